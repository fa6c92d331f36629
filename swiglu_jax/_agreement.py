"""One answer for all processes of a program: the first that has one tells it to the others.

Through the key-value service that ``jax.distributed`` runs for its own start-up. Nobody waits for
anybody: a process that finds no answer makes its own, and takes another's that came first. So it
does no harm that the processes ask at different times, or that some never ask.
"""

from collections.abc import Callable
from typing import Any

import jax

from swiglu_jax._compat import coordination_client


def can_agree() -> bool:
    """Whether there is one process, or a service that connects all of them."""
    return jax.process_count() == 1 or coordination_client() is not None


def agreed(key: str, answer: Callable[[], str]) -> str:
    """The answer of all processes, of which there are several, to what ``key`` names.

    Args:
        key: the same in every process.
        answer: makes this process's own, where no other has told one.

    Raises:
        jax.errors.JaxRuntimeError: the service cannot be reached.
    """
    client = coordination_client()
    assert client is not None, "see can_agree"
    found = _told(client, key)
    if found is None:
        try:
            client.key_value_set(key, answer())  # which never overwrites
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        found = _told(client, key)
    assert found is not None, "what was set is there"
    return found


def _told(client: Any, key: str) -> str | None:
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None
