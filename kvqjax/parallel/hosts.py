"""Several hosts that run one program: how they join, and which of their processes prints."""

import jax

from kvqjax._arguments import check_counts, check_integer, whole_number
from kvqjax._errors import UserError

MOST_PORT = 65535  # ports of TCP are numbers of 16 bits


def join_hosts(coordinator: str, processes: int, process: int) -> None:
    """Join this process with those of other hosts. It must come before any other use of JAX.
    `jax.devices()` then lists the devices of all hosts.

    Args:
        coordinator: "host:port" of process 0, which all processes can reach.
        processes: number of processes.
        process: number of this process, from 0 on.

    Raises:
        UserError: for numbers or an address that cannot be right, and where the other processes do
            not come.
    """
    check_counts(processes=processes)
    check_integer("process", process, 0)
    host, _, port = coordinator.rpartition(":")
    # JAX tries an address that cannot be for minutes, and no Ctrl-C ends it.
    if not host or not 1 <= (whole_number(port) or 0) <= MOST_PORT:
        raise UserError(
            f"coordinator {coordinator!r}; wanted host:port, the port from 1 to {MOST_PORT}"
        )
    if not 0 <= process < processes:
        raise UserError(f"process {process} of {processes}; wanted 0 to {processes - 1}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # where the devices are CPUs
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator, num_processes=processes, process_id=process
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"cannot join the hosts at {coordinator}: {str(error).splitlines()[0]}"
        ) from error


def speaks() -> bool:
    """Say whether this process is the one that prints."""
    return jax.process_index() == 0
