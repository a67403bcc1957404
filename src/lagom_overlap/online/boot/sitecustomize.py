"""Starts the hooks of `lagom run`, and those in LAGOM_HOOKS, in a Python process of the job, and takes itself away.

Python imports this module at start because the verb put its folder first on PYTHONPATH. Verbs of other distributions
(`lagom emulate`) set LAGOM_HOOKS: modules, by commas, whose `arm` is called. This one leaves `sys.path` as it would
have been, runs the site's own sitecustomize, if there is one, and never lets an error of ours reach the job.
"""

import contextlib
import os
import sys


def _step_aside() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would be loaded into every process
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]  # noqa: PTH100
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401, PLC0415 - the site's own, if it has one
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own  # Python looks for what it has just imported


def _start() -> None:
    for module in filter(None, os.environ.get("LAGOM_HOOKS", "").split(",")):
        _arm(module)
    if os.environ.get("LAGOM_RUN_MODE") and os.environ.get("LAGOM_DISABLE", "") in ("", "0"):
        _arm("lagom_overlap.online.launch_hooks")


def _arm(module: str) -> None:
    try:
        from importlib import import_module  # noqa: PLC0415 - only in jobs that lagom started

        import_module(module).arm()
    except Exception as error:
        mend = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            mend = f"; install {error.name.replace('_', '-')} for {sys.executable}, which runs the command"
        with contextlib.suppress(Exception):  # stderr may be full or closed, and lagom_overlap.stderr out of reach
            sys.stderr.write(f"lagom: the job runs without us: {type(error).__name__}: {error}{mend}\n")


_start()
_step_aside()
