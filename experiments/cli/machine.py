"""What this machine can do, its models, and the lab."""

from typing import Annotated

import typer

from experiments.cli._app import AsJson, app, print_rows


@app.command()
def models(spec: Annotated[str, typer.Argument(help="A model.")] = "smollm2", as_json: AsJson = False) -> None:
    """Prepare a model and say where it lies.

    Example: `kvworkbench models random:llama-8layer`
    """
    from experiments.models import resolve_model

    print_rows([{k: str(v) for k, v in vars(resolve_model(spec)).items()}], as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Tell what this machine can do, what is missing, and the command that mends it.

    Example: `kvworkbench doctor`
    """
    from experiments.doctor import examine

    findings = examine()
    print_rows(findings, as_json)
    if any(finding["state"] == "missing" and finding["needed"] == "yes" for finding in findings):
        raise typer.Exit(1)


@app.command()
def lab(port: Annotated[int, typer.Option(help="0 for any free port.")] = 8888,
        browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True) -> None:  # fmt: skip
    """Open JupyterLab on 127.0.0.1 with the notebooks; nothing leaves the machine.

    Example: `kvworkbench lab --no-browser`
    """
    from experiments.lab import start_lab

    raise typer.Exit(start_lab(port=port, browser=browser))
