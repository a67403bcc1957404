"""What `lagom run --config` sets, a table or a plan, in force on all ranks or on none.

A rank that cannot read the table would run NCCL's own choice while the others run the table's, and their collective
would hang. Its machine may lack the folder, or its file system may give files to another user, which the plug-in's own
loader refuses. So each rank reads what the launcher wrote and passes it to the plug-in in memory. The file's owner then
does not matter, because the launcher's environment holds the checksum. If one rank cannot apply the table, none does.
The same holds of a plan that FSDP2 is told: units that keep their parameters gather less often, so ranks with the plan
and ranks without it issue different collectives.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from pathlib import Path

from lagom_overlap.engines.bounded import BoundedCalls, Overdue
from lagom_overlap.errors import LagomError, TableError
from lagom_overlap.export.plugin_table import checksum_of
from lagom_overlap.export.run_variables import FIRST_WORLD_VARIABLE, TABLE_CHECKSUM_VARIABLE
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.table_reader import MAX_TABLE_BYTES
from lagom_overlap.online.options import DISABLE_VARIABLE, is_disabled
from lagom_overlap.online.ranks.exchange import Exchange, Store, StoreLost
from lagom_overlap.record import read_regular


def apply_on_all(plugin: TunerPlugin, exchange: Exchange, environment: Mapping[str, str]) -> str:
    """Puts the launcher's table in force on all ranks, each of which calls this; returns why not, empty if it is.

    The plug-in is off when this is called, so that no rank runs alone by a table if another one failed earlier.

    Raises:
        InDoubt: if the store is lost so late that this rank cannot know whether the others have it.
    """
    refusal = _prepared(plugin, environment, exchange.num_ranks)
    refused = on_all(exchange, environment[TABLE_CHECKSUM_VARIABLE], refusal, lambda: plugin.commit(0))
    if not refused:  # elsewhere it stays off, whatever is committed
        plugin.enable(is_enabled=True)
    return refused


def on_all(exchange: Exchange, checksum: str, refusal: str, change: Callable[[], None]) -> str:
    """Makes a change on all ranks, each of which calls this once; returns why not, empty if it is made.

    `checksum` tells what this rank was started with from anything else, `refusal` says why it cannot make the change.
    `change` runs once all ranks are ready. Where it has run and a reason is returned, the caller takes it back.

    Raises:
        InDoubt: if the store is lost so late that this rank cannot know whether the others make the change.
    """
    try:
        if exchange.greet(checksum) != checksum:
            refusal = refusal or "it was started with other settings than the others"
        refusal = refusal and f"rank {exchange.rank}: {refusal}"
        return exchange.agree(0, refusal=refusal, change=change)
    except StoreLost as error:  # no rank has a "yes" without this one
        return str(error)
    finally:
        exchange.close()


def meet(
    open_store: Callable[[str], Store],
    *,
    rank: int,
    num_ranks: int,
    timeout_s: float,
    trouble: Callable[[], str] = str,
    longest_s: Callable[[], float] = lambda: inf,
) -> Exchange:
    """The exchange of the ranks that meet; a restarted process may find the store of its predecessor.

    The arguments are those of `Exchange`.

    Raises:
        StoreLost: if the store does not answer in time.
    """
    arriving = BoundedCalls("lagom-meet")
    try:
        arrived = arriving.call(lambda: open_store("table").add("arrived", 1), min(timeout_s, longest_s()))
    except (RuntimeError, Overdue) as error:
        raise StoreLost(f"the job's store does not answer: {error}") from error
    finally:
        arriving.close()
    reopen = partial(open_store, f"table/{(arrived - 1) // num_ranks}")
    return Exchange(
        reopen(),
        rank=rank,
        num_ranks=num_ranks,
        timeout_s=timeout_s,
        reopen=reopen,
        trouble=trouble,
        longest_s=longest_s,
    )


def _prepared(plugin: TunerPlugin, environment: Mapping[str, str], num_ranks: int) -> str:
    """Passes the table to the plug-in, where a commit puts it in force; returns why not, empty if it is done."""
    if is_disabled():
        return f"{DISABLE_VARIABLE} is set"
    first_world = environment.get(FIRST_WORLD_VARIABLE)
    if first_world is not None and first_world != str(num_ranks):
        return f"it is for the run's first job, of {first_world or 'other'} ranks, and this one has {num_ranks}"
    path = Path(environment["LAGOM_TABLE"])
    try:
        data = read_regular(path, MAX_TABLE_BYTES)
        if checksum_of(data) != environment[TABLE_CHECKSUM_VARIABLE]:
            raise TableError(f"{path} is not the table that was written at the start")
        plugin.prepare(data, 0)
    except OSError as error:
        return f"cannot read the table {path}: {error.strerror}"
    except LagomError as error:
        return str(error)
    return ""
