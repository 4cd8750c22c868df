"""What a policy may be called: a class, an instance, a name, or where its class is written."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from platformdirs import user_data_dir

from workbench.errors import InvalidInputError, UnknownNameError
from workbench.policies.base import form_of, registered_policies

__all__ = ["policy_names", "resolve_policy", "save_policy", "user_policy_folder"]

NOT_POLICIES = {
    "base", "compiled", "generating", "live", "names", "notebook", "plain", "pool", "queues", "rewriting",
    "vllm_offload",
}  # fmt: skip


def policy_names() -> list[str]:
    """The policies that come with the workbench, then those saved by the user."""
    return [*_shipped(), *(name for name in _saved() if name not in _shipped())]


def resolve_policy(spec: Any) -> Any:
    """A policy instance from any of its names.

    Args:
        spec: A policy class or instance; the name of a file in workbench/policies ("lru") or of a saved user policy;
            the name of a class that @policy met in this process; "path/to/file.py:Class"; or "module:Class".

    Raises:
        UnknownNameError: No such name; the message lists those there are.
        InvalidInputError: The class named is not decorated with @policy.
    """
    if not isinstance(spec, str):
        form_of(spec)
        return spec() if isinstance(spec, type) else spec
    if ":" in spec:
        where, _, class_name = spec.rpartition(":")
        module = _load_file(Path(where)) if where.endswith(".py") else _import(where, spec)
        return _class_in(module, class_name)()
    if spec in _shipped():
        module = importlib.import_module(f"workbench.policies.{spec}")
        return _class_in(module, module.__all__[0])()
    if spec in _saved():
        module = _load_file(user_policy_folder() / f"{spec}.py")
        return _class_in(module, module.__all__[0])()
    if spec in registered_policies():
        return registered_policies()[spec]()
    raise UnknownNameError("policy", spec, [*policy_names(), *registered_policies()])


def save_policy(name: str, source: str) -> Path:
    """Save the source of a policy class as a user policy, so that another process can name it.

    Args:
        name: Letters, digits and underscores; not the name of a policy that comes with the workbench.
        source: Python text that defines exactly one class decorated with @policy.

    Returns:
        The file written.

    Raises:
        InvalidInputError: A bad name, or the text does not define one policy.
    """
    if not name.isidentifier() or name in _shipped() or name in NOT_POLICIES:
        raise InvalidInputError(f"a user policy may not be called {name!r}: use an identifier that is not shipped")
    path = user_policy_folder() / f"{name}.py"
    draft = path.with_suffix(".draft.py")
    draft.write_text(source)
    try:
        module = _load_file(draft)
        classes = {n: v for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
        own = [name for name, value in classes.items() if "kv_form" in vars(value)]
        if len(own) != 1:
            raise InvalidInputError(f"the text must define one class decorated with @policy, it defines {len(own)}")
        path.write_text(f"{source.rstrip()}\n\n\n__all__ = [{own[0]!r}]\n")
    finally:
        draft.unlink()
    return path


def user_policy_folder() -> Path:
    """Where saved policies lie: KVWORKBENCH_POLICIES, else a folder of the user's data; created on first use."""
    folder = Path(os.environ.get("KVWORKBENCH_POLICIES") or Path(user_data_dir("kvworkbench")) / "policies")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _shipped() -> list[str]:
    found = (module.name for module in iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in found if name not in NOT_POLICIES and not name.startswith("_"))


def _saved() -> list[str]:
    return sorted(path.stem for path in user_policy_folder().glob("*.py") if path.stem.isidentifier())


def _class_in(module: ModuleType, class_name: str) -> type:
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise UnknownNameError(f"class in {module.__name__}", class_name, classes)
    form_of(found)
    return found


def _import(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"policy {spec!r}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    """Import a policy file under a name of its own; a file that was changed since is imported anew."""
    if not path.is_file():
        raise InvalidInputError(f"no policy file {str(path)!r}")
    path = path.resolve()
    name = f"kvworkbench_user_{path.stem.replace('.', '_')}_{path.stat().st_mtime_ns}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
