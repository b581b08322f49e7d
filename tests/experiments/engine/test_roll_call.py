"""Processes meet, agree and wait; here threads, over real sockets of this machine."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments.engine import roll_call
from experiments.engine.roll_call import disagreement, named

FACTS = {"seed": "0", "source": "1a2b"}


@pytest.fixture
def address():
    """host:port where nobody listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@pytest.fixture
def meet(address):
    """Lets processes meet: (number, count, facts) of each to what became of each of them.

    That is the lines that it said, and the error it ended with or None.
    """

    def one(number, count, facts, wait_seconds):
        said = []
        try:
            roll_call.meet(address, count, number, facts, wait_seconds, said.append)
        except ValueError as error:
            return said, str(error)
        return said, None

    def meet(*those, wait_seconds=20.0):
        with ThreadPoolExecutor(len(those)) as pool:
            return list(pool.map(lambda of: one(of[0], of[1], of[2], wait_seconds), those))

    return meet


def knock(address, content, *, hang_up=True):
    """Say something to process 0, as soon as it listens; returns the connection."""
    host, port = address.split(":")
    while True:
        try:
            line = socket.create_connection((host, int(port)))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    line.sendall(content)
    if hang_up:
        line.close()
    return line


def test_processes_that_agree_begin_and_each_says_for_whom_it_waits(meet, address):
    results = meet(*((number, 3, FACTS) for number in (2, 0, 1)))
    until = f"at {address}, up to 20 s"
    assert results == [
        ([f"waiting for process 0 {until}"], None),
        ([f"waiting for processes 1, 2 {until}"], None),
        ([f"waiting for process 0 {until}"], None),
    ]


def test_one_process_waits_for_nobody(meet):
    assert meet((0, 1, FACTS)) == [([], None)]


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ({"seed": "1"}, "seed is 1 in process 1, 0 in process 0"),
        (
            {"seed": "1", "source": "ff"},
            "seed is 1 in process 1, 0 in process 0; source is ff in process 1, 1a2b in process 0",
        ),
        ({"new.py": "77"}, "new.py is 77 in process 1, missing in process 0"),
    ],
)
def test_processes_that_differ_all_end_with_the_same_line(meet, theirs, line):
    results = meet((0, 3, FACTS), (1, 3, FACTS | theirs), (2, 3, FACTS))
    assert [error for _, error in results] == [f"distributed: {line}"] * 3


def test_another_count_is_refused_at_once(meet):
    began = time.monotonic()
    results = meet((0, 3, FACTS), (1, 2, FACTS))
    line = "distributed: num_processes is 2 in process 1, 3 in process 0"
    assert [error for _, error in results] == [line] * 2
    assert time.monotonic() - began < 10  # nobody waits for process 2


def test_a_number_that_two_have_is_refused_at_once(meet):
    results = meet((0, 4, FACTS), (1, 4, FACTS), (1, 4, FACTS))
    assert [error for _, error in results] == ["process_id: 1 is given to two processes"] * 3


def test_who_waits_in_vain_says_for_whom_and_so_does_who_came(meet, address):
    results = meet((0, 3, FACTS), (2, 3, FACTS), wait_seconds=0.5)
    line = f"distributed: waited 0.5 s at {address} for process "
    assert results[0][1] == f"{line}1"
    assert results[1][1] in (f"{line}1", f"{line}0: who answers there does not begin the run")


def test_without_process_0_the_reason_is_named(meet, address):
    assert meet((1, 2, FACTS), wait_seconds=0.3)[0][1] == (
        f"distributed: waited 0.3 s at {address} for process 0: Connection refused"
    )


def test_a_host_that_cannot_be_is_named():
    with pytest.raises(ValueError, match=r"^distributed: waited 0.1 s at a..b:1 for process 0: "):
        roll_call.meet("a..b:1", 2, 1, FACTS, 0.1, lambda line: None)


def test_a_taken_port_is_one_line_before_anybody_is_waited_for(meet, address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))):
        error = f"coordinator_address: {address}: Address already in use"
        assert meet((0, 2, FACTS)) == [([], error)]


def test_what_else_listens_there_is_not_process_0(meet, address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server:

        def answer():
            line, _ = server.accept()
            with line:
                line.sendall(b"220 mail.example.com ESMTP\r\n")

        threading.Thread(target=answer).start()
        assert meet((1, 2, FACTS), wait_seconds=0.5)[0][1] == (
            f"distributed: waited 0.5 s at {address} for process 0: "
            "who answers there does not begin the run"
        )


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\n", b"[" * 10**5 + b"\n", b"[]\n"),
        b'{"process": "1", "facts": {}}\n',
        b'{"process": 1, "facts": 3}\n',
    ],
)
def test_strangers_are_not_counted(meet, address, content):
    stranger = threading.Thread(target=knock, args=(address, content))
    stranger.start()
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(meet, (0, 2, FACTS))
        stranger.join()
        assert meet((1, 2, FACTS))[0][1] is None
        assert leader.result()[0][1] is None


def test_a_silent_stranger_holds_nobody_up_for_long(meet, address, monkeypatch):
    monkeypatch.setattr(roll_call, "_WORDLESS_SECONDS", 0.2)
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(meet, (0, 2, FACTS))
        with knock(address, b"", hang_up=False):
            assert meet((1, 2, FACTS))[0][1] is None
        assert leader.result()[0][1] is None


def test_a_process_that_is_started_again_comes_again(meet, address):
    call = json.dumps({"process": 1, "facts": {"num_processes": "3", **FACTS}}).encode() + b"\n"
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(meet, (0, 3, FACTS))
        knock(address, call)
        assert [error for _, error in meet((1, 3, FACTS), (2, 3, FACTS))] == [None, None]
        assert leader.result()[0][1] is None


def test_one_line_however_much_differs():
    ours = {f"file{i}": "a" for i in range(9)}
    theirs = {f"file{i}": "b" for i in range(9)}
    line = disagreement({0: ours} | dict.fromkeys(range(1, 40), theirs))
    assert line is not None
    assert line.count("file") == 4 and line.endswith("; and 5 more")
    assert "file0 is b in processes 1, 2, 3, 4, 5, 6, 7, 8, and 31 more, a in process 0" in line


def test_the_first_that_differs_is_shown_with_those_like_it():
    seeds = {0: "0", 1: "0", 2: "5", 3: "6", 4: "5"}
    assert disagreement({number: {"seed": seed} for number, seed in seeds.items()}) == (
        "distributed: seed is 5 in processes 2, 4, 0 in process 0"
    )
    assert disagreement(dict.fromkeys(range(9), FACTS)) is None
    assert named([7]) == "process 7"
