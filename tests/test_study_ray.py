"""The same study on a real local Ray cluster of two nodes' processes."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvworkbench[study]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

from ray.cluster_utils import Cluster
from test_study import SPACE, TRACE, make_study, wait_for

SAME = ["cell", *SPACE, "repeat", "hit_rate", "hit_rate_by_requests", "evictions", "effective.capacity_chunks"]

# Says in which process it is first asked, and waits there for leave: a cell lasts as long as the test needs it to.
GATED_POLICY = '''
import os
import time
from pathlib import Path

from workbench.policies import policy

BEGUN, LEAVE = Path("{folder}/begun"), Path("{folder}/leave")


@policy
class Gated:
    """Evicts the newest, once it may."""

    compile = False
    fields = dict(older="i4")
    scalars = dict(top=-1)

    def on_insert(self, c):
        self.older[c] = self.top
        self.top = c

    def on_hit(self, c):
        pass

    def evict(self):
        if not LEAVE.exists():
            partial = BEGUN.with_suffix(".partial")
            partial.write_text(str(os.getpid()))
            partial.replace(BEGUN)
        while not LEAVE.exists():
            time.sleep(0.01)
        c = self.top
        self.top = self.older[c]
        return c
'''


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20,
                                                            "include_dashboard": False})  # fmt: skip
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=cluster.address, log_to_driver=False, include_dashboard=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def gated(tmp_path) -> "Gated":
    (tmp_path / "gated.py").write_text(GATED_POLICY.replace("{folder}", str(tmp_path)))
    return Gated(tmp_path)


class Gated:
    """A study of two cells, one of which waits for leave."""

    def __init__(self, folder: Path):
        self.begun, self.leave = folder / "begun", folder / "leave"
        self.policy = f"{folder / 'gated.py'}:Gated"
        self.study = make_study(folder, space={"policy": ["lru", self.policy]}, fixed={**TRACE, "capacity_chunks": 40})

    def wait_until_inside(self) -> int:
        """The process that runs the cell, once it does and the other cell is done."""
        wait_for(lambda: self.begun.exists() and self.study.status().done == 1, 90)
        return int(self.begun.read_text())


def actors() -> list[int]:
    """Processes of this cluster that run cells, or may."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("_RayCells" in part for part in process.cmdline()):
                found.append(process.pid)
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
    return found


def test_one_worker_two_workers_and_this_machine_give_the_same_rows(cluster, tmp_path):
    from experiments.study.executors import RayWorkers

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
    wait_for(lambda: not actors(), 60)


def test_an_actor_killed_in_a_cell_is_replaced_and_the_row_says_so(cluster, gated):
    killed = []

    def kill_it():
        killed.append(gated.wait_until_inside())
        os.kill(killed[0], signal.SIGKILL)
        gated.leave.touch()

    killer = threading.Thread(target=kill_it, daemon=True)
    killer.start()
    frame = gated.study.run("ray").frame()
    killer.join(10)
    row = next(row for row in gated.study.rows() if row["settings"]["policy"] == gated.policy)
    assert killed and frame.height == 2 and set(frame["error"]) == {""}
    assert row["attempts"] == 2 and "Died" in row["worker_deaths"][0] and row["provenance"]["pid"] not in killed


def test_a_stop_ends_the_actors_within_a_second(cluster, gated):
    runner = threading.Thread(target=gated.study.run, args=("ray",), daemon=True)
    runner.start()
    inside = gated.wait_until_inside()
    began = time.monotonic()
    gated.study.stop()
    runner.join(10)
    assert time.monotonic() - began < 2, "a second, and what a busy machine adds; the cell itself never ends"
    status = gated.study.status()
    assert (status.state, status.done, status.pid) == ("stopped", 1, os.getpid())
    wait_for(lambda: inside not in actors(), 60)
