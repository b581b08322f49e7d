"""Before a run of several processes: who is there, and whether they agree. Uses no JAX.

Process 0 listens where JAX's coordinator will; the others come, say what they go by, and hear
whether the run begins. JAX is no help so early: it aborts a process that waits in vain, has another
count or finds its port taken, and Python never hears of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Facts = Mapping[str, str]

_COUNT = "num_processes"
_LONGEST = 2**20  # bytes of a message
_WORDLESS_SECONDS = 5.0  # for which a stranger may hold the line
_RETRY_SECONDS = 0.2


def meet(
    address: str,
    count: int,
    number: int,
    facts: Facts,
    wait_seconds: float,
    say: Callable[[str], None],
) -> None:
    """Wait until all processes are here, and compare what they go by.

    Args:
      address: host:port of process 0.
      count: how many processes there are.
      number: which of them this is.
      facts: what all must have in common, by name.
      wait_seconds: how long to wait for the others.
      say: called with a line that says for whom.

    Raises:
      ValueError: they don't agree, not all came, or process 0 can't listen. One line, the same in
        all that came.
    """
    wait = _Wait(address, wait_seconds, time.monotonic() + wait_seconds, say)
    facts = {_COUNT: str(count), **facts}
    if number == 0:
        _lead(wait, facts, count)
    else:
        _join(wait, facts, number)


def disagreement(facts: Mapping[int, Facts]) -> str | None:
    """What processes differ in, in one line; None if in nothing.

    Args:
      facts: of each process, by its number; the others are compared with 0.
    """
    differences = []
    for name in dict.fromkeys(name for theirs in facts.values() for name in theirs):
        values = {number: theirs.get(name, "missing") for number, theirs in sorted(facts.items())}
        ours = values[0]
        if other := [value for value in values.values() if value != ours][:1]:
            those = named(number for number in values if values[number] == other[0])
            differences.append(f"{name} is {other[0]} in {those}, {ours} in process 0")
    return f"distributed: {'; '.join(_some(differences, 4))}" if differences else None


def named(numbers: Iterable[int]) -> str:
    """`process 1`, or `processes 1, 2, 3`."""
    texts = [str(number) for number in numbers]
    return f"process{'es' * (len(texts) > 1)} {', '.join(_some(texts, 8))}"


def _some(texts: Sequence[str], most: int) -> Sequence[str]:
    more = len(texts) - most
    return [*texts[:most], f"and {more} more"] if more > 0 else texts


class _Wait(NamedTuple):
    """Where and how long."""

    address: str
    seconds: float
    until: float  # by the monotonic clock
    say: Callable[[str], None]

    def begin(self, numbers: Sequence[int]) -> None:
        """Say that it begins, and for whom."""
        if numbers:
            self.say(f"waiting for {named(numbers)} at {self.address}, up to {self.seconds:g} s")

    def left(self) -> float:
        """Seconds, as a timeout has them: 0 would be none."""
        return max(self.until - time.monotonic(), 1e-3)

    def in_vain(self, numbers: Sequence[int]) -> str:
        """That it is over, and who did not come."""
        return f"distributed: waited {self.seconds:g} s at {self.address} for {named(numbers)}"


# Process 0 ------------------------------------------------------------------------------------


class _Caller(NamedTuple):
    """A process that has come."""

    number: int
    facts: Facts
    line: socket.socket


def _lead(wait: _Wait, facts: Facts, count: int) -> None:
    came: list[_Caller] = []
    refusal = None
    with contextlib.ExitStack() as lines:
        with _listen(wait.address) as server:
            wait.begin(range(1, count))
            while refusal is None and len(came) < count - 1:
                try:
                    server.settimeout(wait.left())
                    line = lines.enter_context(server.accept()[0])
                except TimeoutError:
                    missing = set(range(1, count)) - {caller.number for caller in came}
                    refusal = wait.in_vain(sorted(missing))
                    break
                match _receive(line, _WORDLESS_SECONDS):
                    case {"process": int(number), "facts": dict(theirs)}:
                        # One that was started again calls again.
                        came = [caller for caller in came if not _hung_up(caller.line)]
                        came.append(_Caller(number, theirs, line))
                        refusal = _misfit(came, facts)
        refusal = refusal or disagreement({0: facts, **{c.number: c.facts for c in came}})
        for caller in came:
            _send(caller.line, {"refusal": refusal})
    if refusal is not None:
        raise ValueError(refusal)


def _misfit(came: Sequence[_Caller], facts: Facts) -> str | None:
    """Why waiting for more makes no sense after the last one."""
    number, theirs, _ = came[-1]
    if number in (0, *(caller.number for caller in came[:-1])):
        return f"process_id: {number} is given to two processes"
    counts = {0: facts[_COUNT], number: theirs.get(_COUNT, "missing")}
    return disagreement({n: {_COUNT: value} for n, value in counts.items()})


def _listen(address: str) -> socket.socket:
    """A socket where JAX's coordinator will listen, which is everywhere unless told otherwise."""
    everywhere = f"[::]:{address.rpartition(':')[2]}"
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", everywhere)
    host, _, port = bound.rpartition(":")
    host = host.strip("[]")
    if host == "::" and not socket.has_dualstack_ipv6():
        host = ""
    try:
        return socket.create_server(
            (host, int(port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            dualstack_ipv6=host == "::",
            backlog=128,
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ValueError(f"coordinator_address: {address}: {reason}") from None


# The others -----------------------------------------------------------------------------------


def _join(wait: _Wait, facts: Facts, number: int) -> None:
    host, _, port = wait.address.rpartition(":")
    wait.begin([0])
    reason = ""
    while time.monotonic() < wait.until:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), wait.left()) as line:
                _send(line, {"process": number, "facts": facts})
                match _receive(line, wait.left()):
                    case {"refusal": None}:
                        return
                    case {"refusal": str(refusal)}:
                        raise ValueError(refusal)
            reason = ": who answers there does not begin the run"
        except (OSError, UnicodeError) as error:  # UnicodeError: no host has such a name
            reason = f": {getattr(error, 'strerror', None) or error}"
        time.sleep(_RETRY_SECONDS)
    raise ValueError(wait.in_vain([0]) + reason)


# What they say: lines of JSON -----------------------------------------------------------------


def _send(line: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever is gone need not hear it
        line.settimeout(_WORDLESS_SECONDS)
        line.sendall(json.dumps(message).encode() + b"\n")


def _receive(line: socket.socket, seconds: float) -> Any:
    """A message; None if none comes in time."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        line.settimeout(seconds)
        with line.makefile("rb") as lines:
            return json.loads(lines.readline(_LONGEST))
    return None


def _hung_up(line: socket.socket) -> bool:
    """Whether a caller, who waits for our word, is gone."""
    try:
        line.setblocking(False)
        return not line.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
