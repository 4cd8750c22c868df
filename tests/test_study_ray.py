"""The same study on a real local Ray cluster of two nodes' processes."""

import os
import signal
import threading
import time

import psutil
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

from ray.cluster_utils import Cluster
from test_study import SPACE, TRACE, make_study, slow_policy, wait_for

SAME = ["cell", *SPACE, "repeat", "hit_rate", "hit_rate_by_requests", "evictions", "effective.capacity_chunks"]


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20,
                                                            "include_dashboard": False})  # fmt: skip
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=cluster.address, log_to_driver=False, include_dashboard=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def actors() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if any("_RayCells" in part for part in p.cmdline())]


def test_one_worker_two_workers_and_this_machine_give_the_same_rows(cluster, tmp_path):
    from experiments.study_executors import RayWorkers

    assert len(ray.nodes()) == 2
    local = make_study(tmp_path, name="local", repeats=2).run()
    two = make_study(tmp_path, name="two", repeats=2)
    assert RayWorkers(two.description, two.folder).size == 2
    two.run("ray")
    assert two.frame()["worker"].n_unique() == 2 and two.status().state == "finished"
    one = make_study(tmp_path, name="one", repeats=2).run("ray", workers=1)
    assert one.frame()["worker"].n_unique() == 1
    for study in (one, two):
        assert study.frame().select(SAME).equals(local.frame().select(SAME))
    wait_for(lambda: not actors(), 10)


def test_an_actor_killed_in_a_cell_is_replaced_and_the_row_says_so(cluster, tmp_path):
    study = make_study(tmp_path, space={"policy": ["lru", slow_policy(tmp_path, 0.01)]},
                       fixed={**TRACE, "capacity_chunks": 40})  # fmt: skip
    killed = []

    def kill_one():
        while not killed:
            time.sleep(0.1)
            if study.status().done == 1:
                busy = actors()
                time.sleep(0.5)
                for process in busy:
                    process.send_signal(signal.SIGKILL)
                    killed.append(process.pid)

    threading.Thread(target=kill_one, daemon=True).start()
    frame = study.run("ray").frame()
    row = next(row for row in study.rows() if "slow" in row["settings"]["policy"])
    assert killed and frame.height == 2 and set(frame["error"]) == {""}
    assert row["attempts"] == 2 and "Died" in row["worker_deaths"][0] and row["provenance"]["pid"] not in killed


def test_a_stop_ends_the_actors_within_a_second(cluster, tmp_path):
    study = make_study(tmp_path, space={"policy": ["lru", slow_policy(tmp_path, 0.05)]},
                       fixed={**TRACE, "trace.sessions": 60, "capacity_chunks": 40})  # fmt: skip
    runner = threading.Thread(target=study.run, args=("ray",))
    runner.start()
    end = time.monotonic() + 60
    while study.status().done < 1 and time.monotonic() < end:
        time.sleep(0.05)
    began = time.monotonic()
    study.stop()
    runner.join(10)
    assert time.monotonic() - began < 1.5 and study.status().state == "stopped" and study.status().done == 1
    assert study.status().pid == os.getpid()
