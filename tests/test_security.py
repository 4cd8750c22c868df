"""What a hostile record, file name or folder can do: nothing."""

import ast
import os
import stat
from pathlib import Path

import pytest
from oracle import IDENTITY, Pages, chain_of

from workbench.engine import CacheEngine
from workbench.errors import InvalidInputError
from workbench.tiers.disk import DiskTier

ROOT = Path(__file__).parent.parent
NEVER_IMPORTED = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
NEVER_CALLED = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load", "compile"}

# The one place that runs generated text: a policy class becomes a module, which is written to disk and imported.
ALLOWED = {("workbench/policies/compiled.py", "compile")}


def dangers_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= NEVER_IMPORTED & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= NEVER_IMPORTED & {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            found |= NEVER_CALLED & {ast.unparse(node.func)}
    return found


def test_nothing_in_the_data_path_runs_what_it_reads():
    for package in ("kernels", "workbench"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            assert not {d for d in dangers_in(path) if (name, d) not in ALLOWED}, name


def test_the_search_itself_finds_what_it_looks_for(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle\nfrom dill import loads\nx = eval('1')\nnp.load(f, allow_pickle=True)\ntorch.load(f)\n"
    )
    assert dangers_in(path) == {"pickle", "dill", "eval", "np.load", "torch.load"}


@pytest.fixture
def stored(tmp_path):
    """(folder, tokens, pages) with two chunks on disk."""
    folder, tokens, pages = tmp_path / "kv", list(range(16)), Pages(8)
    pages.compute(chain_of(tokens), range(4))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=folder) as engine:
        engine.store(tokens, pages.table, blocks=range(4))
    return folder, tokens, pages


def test_folders_and_files_are_for_this_user_alone(stored):
    folder, _, _ = stored
    modes = {stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.iterdir()]}
    assert modes == {0o700}
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert len(files) == 2 and {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}


def test_names_on_disk_are_digests(stored):
    folder, tokens, _ = stored
    expected = {f"{c.key.hex()[:2]}/{c.key.hex()}.kv" for c in chain_of(tokens)}
    assert {str(p.relative_to(folder)) for p in folder.rglob("*.kv")} == expected


def test_a_folder_that_all_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidInputError, match="777"):
        DiskTier(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path):
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(InvalidInputError, match="12345"):
        DiskTier(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError):
        DiskTier(tmp_path / "file")


def test_a_link_at_our_name_is_neither_followed_nor_in_the_way(stored, tmp_path):
    folder, tokens, pages = stored
    key = chain_of(tokens)[0].key.hex()
    place, victim = folder / key[:2] / f"{key}.kv", tmp_path / "victim"
    victim.write_bytes(place.read_bytes())
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=folder) as engine:
        place.unlink()
        place.symlink_to(victim)
        assert engine.retrieve(tokens, pages.table, blocks=range(4)) == 0
        assert engine.stats()["failed_loads"]["corrupt"] == 1
        assert not place.is_symlink() and victim.exists(), "the link goes, its target stays"
        assert engine.store(tokens, pages.table, blocks=range(4)) == 8
        engine.flush()
        assert engine.retrieve(tokens, pages.table, blocks=range(4)) == 16
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=folder) as engine:
        place.unlink()
        place.symlink_to(victim)
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=folder) as engine:
        assert engine.lookup(tokens) == 0, "a link is no record"
    assert victim.exists()


def test_a_link_is_not_written_through(tmp_path):
    folder, tokens, pages, victim = tmp_path / "kv", list(range(8)), Pages(8), tmp_path / "victim"
    victim.write_text("precious")
    key = chain_of(tokens)[0].key.hex()
    (folder / key[:2]).mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (folder / key[:2] / f"{key}.kv").symlink_to(victim)
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=folder) as engine:
        engine.store(tokens, pages.table, blocks=range(2))
        engine.flush()
        assert victim.read_text() == "precious"
        assert engine.retrieve(tokens, pages.table, blocks=range(2)) == 0


@pytest.mark.parametrize("text", ["../../evil", "org/model", "org/model-SEP-name", "/etc/passwd", "a\0b", "x" * 300])
def test_no_name_of_a_model_or_tenant_gets_out_of_the_folder(tmp_path, text):
    from workbench.chunks import ChunkScope
    from workbench.layout import Identity

    identity, scope = Identity(layout=IDENTITY.layout, weights=text), ChunkScope(salt=text, lora=(text, text))
    folder, pages = tmp_path / "deep" / "kv", Pages(8)
    with CacheEngine(identity, memory_bytes=0, disk_path=folder) as engine:
        engine.store(range(8), pages.table, blocks=range(2), scope=scope)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 1 and files[0].parent.parent == folder
    assert len(files[0].name) == 64 + 3
