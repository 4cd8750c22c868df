"""A link of a chosen bandwidth, and where a codec behind it pays."""

import math
import socket
import threading
import time

import polars as pl
import pytest

from experiments.codec_links import CodecLinks, codec_links
from experiments.links import LimitedLink
from experiments.plots.ttft_by_bandwidth import plot_ttft_by_bandwidth, ttft_by_bandwidth_data
from workbench.errors import InvalidInputError


@pytest.fixture
def echo():
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection):
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def there_and_back(port, nbytes):
    """Seconds for so many bytes, and whether they came back as they were."""
    data = bytes(range(256)) * (nbytes // 256)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        start = time.monotonic()
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        got = bytearray()
        while len(got) < len(data):
            got += connection.recv(1 << 16)
        return time.monotonic() - start, bytes(got) == data


def test_a_link_is_never_faster_than_its_bandwidth(echo):
    with LimitedLink(port=echo, bytes_per_second=math.inf) as link:
        seconds, same = there_and_back(link.port, 4 << 20)
        assert same
        link.bytes_per_second = 8 << 20
        slow, same = there_and_back(link.port, 4 << 20)
        assert same and slow > max(0.45, seconds)


def test_a_link_to_nowhere_refuses_and_a_closed_one_is_closed(echo):
    link = LimitedLink(port=echo, bytes_per_second=1e9)
    connection = socket.create_connection(("127.0.0.1", link.port))
    connection.sendall(b"x")
    assert connection.recv(1) == b"x"
    link.close()
    link.close()
    assert connection.recv(1) == b""
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", link.port), timeout=1)
    with pytest.raises(InvalidInputError):
        LimitedLink(port=echo, bytes_per_second=0)


def test_the_crossing_is_where_both_take_as_long():
    rows = [
        *[dict(codec="raw", gbit_per_s=g, ttft_s=1.0 / g + 0.1) for g in (0.1, 1.0, 10.0)] * 3,
        *[dict(codec="half", gbit_per_s=g, ttft_s=0.5 / g + 0.35) for g in (0.1, 1.0, 10.0)] * 3,
        *[dict(codec="slow", gbit_per_s=g, ttft_s=2.0 / g + 1.0) for g in (0.1, 1.0, 10.0)] * 3,
        *[dict(codec="no reuse", gbit_per_s=g, ttft_s=3.0) for g in (0.1, 1.0, 10.0)] * 3,
    ]
    data = ttft_by_bandwidth_data(pl.DataFrame(rows))
    crossing = dict(data.select("codec", "crossing_gbit_per_s").iter_rows())
    assert 1.0 < crossing["half"] < 4.0  # exactly 2 for the true curves; between points the line is straight in logs
    assert crossing["slow"] is None and crossing["raw"] is None and crossing["no reuse"] is None
    figure = plot_ttft_by_bandwidth(data)
    assert "Gbit/s" in figure.layout.xaxis.title.text and len(figure.data) == 4
    assert "pays below" in next(trace.name for trace in figure.data if trace.name.startswith("half"))


def test_no_link_no_lines():
    data = ttft_by_bandwidth_data(pl.DataFrame([dict(codec="raw", gbit_per_s=math.inf, ttft_s=1.0)]))
    assert not plot_ttft_by_bandwidth(data).data


def test_links_come_back_as_they_were_saved(tmp_path):
    frame = pl.DataFrame(
        [dict(codec="raw", place="disk", gbit_per_s=math.inf, question=1, prompt_tokens=9, hit_tokens=8, ttft_s=0.5,
              first_token_equal=True)]
    )  # fmt: skip
    CodecLinks(frame, "measured", "m").save(tmp_path / "links.json")
    back = CodecLinks.load(tmp_path / "links.json")
    assert back.frame.equals(frame) and (back.badge, back.model) == ("measured", "m")
    (tmp_path / "links.json").write_text("[]")
    with pytest.raises(InvalidInputError, match="no measured links"):
        CodecLinks.load(tmp_path / "links.json")


def test_a_place_that_is_none():
    with pytest.raises(InvalidInputError, match="memory, disk, redis"):
        codec_links(place="tape")


@pytest.mark.vllm
@pytest.mark.slow
def test_codecs_behind_a_link_under_vllm():
    links = codec_links("random:tiny", codecs=("raw", "int8"), gbits=(1.0, 10.0), document_tokens=600, repeats=1)
    frame = links.frame
    hits = frame.filter(pl.col("codec") != "no reuse")["hit_tokens"]
    assert frame.height == 6 and (hits >= 512).all()
    assert (frame.filter(pl.col("codec") == "no reuse")["hit_tokens"] == 0).all()
