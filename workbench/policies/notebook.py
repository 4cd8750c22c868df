"""`%%policy name`: a cell that defines a policy class and saves it, so that a vLLM process can name it too.

%load_ext workbench.policies.notebook

%%policy mine
class Mine: ...
"""

from typing import Any

from workbench.policies.base import policy
from workbench.policies.names import resolve_policy, save_policy

__all__ = ["load_ipython_extension"]

HEADER = "import math\n\nimport numpy as np\n\nfrom workbench.policies import policy\n\n\n"


def load_ipython_extension(shell: Any) -> None:
    """Register the cell magic with IPython."""

    def policy_magic(line: str, cell: str) -> Any:
        """Save the cell's policy class under the name on the magic's line and put the class into the notebook."""
        source = cell if "@policy" in cell else f"@policy\n{cell}"
        path = save_policy(line.strip(), HEADER + source)
        made = resolve_policy(line.strip())
        shell.push({type(made).__name__: type(made), "policy": policy})
        print(f"policy {line.strip()!r} saved to {path}")

    shell.register_magic_function(policy_magic, magic_kind="cell", magic_name="policy")
