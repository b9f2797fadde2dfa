"""A launch: the processes of one job, from the first start to the last end.

Theory of operation
-------------------
One loop waits for what the processes print, for what they report (at which port the scheduler
listens, how a command ended) and for signals, SIGCHLD among them. A process that ends changes how
the launch stands::

    going ──a worker fails for good──► ending ──10 s──► stopping ──10 s──► killing
      │     (so a server, or            │    SIGTERM to     ▲   SIGKILL to    ▲
      │     the scheduler)              │    the workers    │   everything    │
      │                                 └── Ctrl-C, SIGTERM ┘   Ctrl-C twice ─┘
      ├──Ctrl-C, SIGTERM, with checkpoints and a grace──► draining: stops once a last checkpoint is written
      └──every worker ends with 0──► done: servers and scheduler end by themselves

The others of a failed worker are given time, since they learn of it from the scheduler and have something
to say about it themselves. Where each of the others has a store that shrinks, the launch stays as it is.
The reports come along one pipe, so they tell which worker failed first: a worker that fails because another
did is later.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvps import config
from kvps.core.membership_client import EXIT_CONFIG
from kvps.core.scheduler.seat import range_of
from kvps.launchers.agent import ERROR, REPORT
from kvps.launchers.children import Child, Foothold, start_here
from kvps.launchers.output import LineBuffer, OutputMux, TracebackFolder, Who, bar_text
from kvps.launchers.reaper import Reaper
from kvps.launchers.remote import Remote
from kvps.net.memory import share_bytes
from kvps.observe import logs
from kvps.observe.logs import Speaker, speaker, wrapped
from kvps.runtime.key_files import KeyMemory, generate, text_for
from kvps.runtime.member_process import handle

log = logging.getLogger("kvps")
OTHERS_MAX_S = 10.0
"""How long the other workers may take to end when one has failed."""
STOP_MAX_S = 10.0
"""Seconds that a process may take to end when it is asked to; more than kvps-worker gives its command."""
DONE_MAX_S = 10.0
"""How long servers and scheduler may take to end when every worker has."""
LATE_MAX_S = 0.3
"""How long servers may take when the scheduler has: one that still runs came after the job."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes to start, and their settings."""

    workers: int
    servers: int
    max_restarts: int
    env: dict[str, str]
    """The environment of processes on this machine."""
    role_env: Mapping[str, Mapping[str, str]]
    """Variables of the processes of one role, by role, wherever they are."""
    command: Sequence[str]
    log_level: str
    log_format: str = "text"
    """Format of log lines; with ``json``, the lines that commands print are wrapped, too."""
    checkpoint_dir: str | None = None
    """Where servers write checkpoints; one that fails is started again from there."""
    checkpoint_every: str | None = None
    keys: str | None = None
    """Where the keys of the job are; None to make some."""
    is_keyless: bool = False
    """Processes take connections by anybody."""
    grace_s: float | None = None
    """How long a command is given to leave at SIGTERM; None where it is not to leave, but to end."""
    http: str | None = None
    """Where the scheduler serves the dashboard, if a flag says so; KVPS_HTTP, it reads itself."""
    is_http_insecure: bool = False
    """Other machines may read there."""
    replicas: int = 0
    """How many copies of each server there are, in processes of other servers."""
    remote: Remote | None = None
    """Other hosts for workers and servers; None if all processes run on this machine."""
    most_workers: int = 0
    """Workers may be added until there are so many; 0 if none may."""
    most_servers: int = 0
    """So many processes may hold servers, each of which is a seat of its own; 0 for no more than at first."""

    @property
    def seats(self) -> int:
        """The number of servers; processes hold several where more of them may come."""
        return self.most_servers or self.servers

    def ranks_of(self, process: int) -> str:
        """Return the servers that one of the first processes holds, or one that came later."""
        first = range(process, self.seats, self.servers) if process < self.servers else [process]
        return ",".join(map(str, first))


class LaunchStage(enum.IntEnum):
    """How a launch stands."""

    GOING = 0
    DRAINING = 1
    """The launch was asked to end, and a last checkpoint is being written."""
    DONE = 2
    """Every worker ended with 0."""
    ENDING = 3
    """Somebody failed; the others are given time."""
    STOPPING = 4
    KILLING = 5


class Launch:
    """All processes of one job on this machine."""

    def __init__(self, plan: LaunchPlan, output: OutputMux, reaper: Reaper) -> None:
        self._plan = plan
        self._output = output
        self._reaper = reaper
        self._children: dict[int, Child] = {}
        """By process id."""
        self._stage = LaunchStage.GOING
        self._next_at: float | None = None
        """When the next stage begins."""
        self._grace_until = 0.0
        """When the commands have used up the time that they have after SIGTERM."""
        self._worker_code = 0
        """The exit code of the first worker that failed permanently."""
        self._other_code = 0
        """The exit code for the first signal, or of the first server or scheduler that failed."""
        self._goes_on = False
        self._rebuilds = False
        """All stores are made again from what the workers hold when a server is lost."""
        """All workers go on without a lost one, as the scheduler has it from their stores."""
        self._keys: KeyMemory | None = None
        """The keys that were made for this job, if any."""
        self._host = "127.0.0.1" if plan.remote is None else plan.remote.own_address()
        if plan.keys is None and not plan.is_keyless:
            self._keys = KeyMemory(generate())
        self._sent_keys: dict[str, str] = {}
        """By role: the given keys, for processes on other hosts, which cannot read them here."""
        if plan.keys is not None and plan.remote is not None:
            self._sent_keys = {role: text_for(plan.keys, role) for role in ("server", "worker")}
        self._scheduler = ""
        self._foothold: Foothold | None = None
        """Where the scheduler is started again; None if it is not to be."""
        self._selector = selectors.DefaultSelector()
        self._report = os.pipe()
        self._reported = LineBuffer()
        self._folder = TracebackFolder()
        self._why_scheduler_ended = ""
        self._waker, self._woken = socket.socketpair()

    def run(self) -> int:
        """Run until every process has ended; return the exit code."""
        for fd in (self._report[0], self._woken.fileno(), self._waker.fileno()):
            os.set_blocking(fd, False)
        self._listen(self._report[0], self._on_report)
        self._listen(self._woken.fileno(), self._on_signals)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handle(number, lambda *_: None)  # the loop reads them from the pipe
        try:
            if self._plan.max_restarts:
                self._foothold = Foothold(self._reaper, self._host)
            self._show_seats(0)
            log.info("%d workers, %d servers", self._plan.workers, self._plan.servers)
            if self._keys is not None:
                log.info("the job's keys, for kvps status: --keys %s", self._keys.path)
            self._start_scheduler(0)
            while self._children:
                self._turn()
        finally:
            for child in self._children.values():
                child.abandon()
                child.process.wait()
                self._reaper.forget(child.process.pid)
            self._show_held(math.inf)
            self._output.close()
            if self._foothold is not None:
                self._foothold.close()
            if self._keys is not None:
                self._keys.close()
        return self._worker_code or self._other_code

    # --- the loop -----------------------------------------------------------------------------

    def _listen(self, fd: int, on_ready: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_ready)

    def _turn(self) -> None:
        times = [at for at in (self._next_at, self._folder.due()) if at is not None]
        left_s = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(left_s):
            if self._selector.get_map().get(key.fd) is key:  # else it was closed just now
                key.data()
        self._show_held(time.monotonic())
        if self._next_at is not None and time.monotonic() >= self._next_at:
            self._go_on()

    def _on_signals(self) -> None:
        for number in self._woken.recv(4096):
            if number != signal.SIGCHLD:
                self._stop(number)
        for pid in list(self._children):
            if self._children[pid].process.poll() is not None:
                self._end(self._children[pid])

    def _on_report(self) -> None:
        with suppress(BlockingIOError):
            for line in self._reported.feed(os.read(self._report[0], 4096)):
                match line.decode().split():
                    case ["scheduler", endpoint]:
                        self._start_members(endpoint)
                    case ["dashboard", url]:
                        self._tell(f"dashboard: {url}")
                    case ["seats", taken]:
                        self._show_seats(int(taken))
                    case ["ended", *words]:
                        self._why_scheduler_ended = f": {' '.join(words)}"
                    case ["servers", count]:
                        self._start_more_servers(int(count))
                    case ["rebuilds", flag]:
                        self._rebuilds = flag == "1"
                    case ["goes-on", flag]:
                        self._follow_policy(flag == "1")
                    case ["checkpoint", number] if self._stage is LaunchStage.DRAINING:
                        if int(number):  # else the scheduler has said why there is none
                            log.warning("checkpoint %s is written; ending the job", number)
                        self._stop_members(signal.SIGTERM)
                    case ["worker", pid, code] if int(pid) in self._children:
                        self._on_worker_end(self._children[int(pid)], int(code))

    def _show_seats(self, taken: int) -> None:
        """Show on a terminal how many processes have joined, until all have."""
        if not self._output.has_status:
            return
        total = self._plan.workers + self._plan.seats
        text = "" if taken >= total else bar_text(taken, total, "processes have joined")
        self._output.set_status(text)

    # --- starting -----------------------------------------------------------------------------

    def _start_scheduler(self, life: int) -> None:
        most = range_of(self._plan.workers, self._plan.most_workers)
        sizes: list[object] = ["--workers", most, "--servers", self._plan.seats]
        sizes += ["--replicas", self._plan.replicas] if self._plan.replicas else []
        place = ["--bind", f"tcp://{self._host}:0"] if self._foothold is None else self._foothold.flags
        http = [] if self._plan.http is None else ["--http", self._plan.http]
        self._start("scheduler", 0, life, [*sizes, *place, *http])

    def _start_members(self, endpoint: str) -> None:
        if self._scheduler or self._stage is not LaunchStage.GOING:  # one that was started again
            return
        self._scheduler = endpoint
        log.info("the scheduler listens on %s", endpoint)
        if self._plan.most_workers:
            keys = self._plan.keys or (self._keys.path if self._keys is not None else "")
            log.info(
                "to add a worker, of %d at most: kvps-worker --scheduler %s %s-- %s",
                self._plan.most_workers,
                endpoint,
                f"--keys {keys} " if keys else "",
                shlex.join(self._plan.command),
            )
        for rank in range(self._plan.servers):
            self._start_server(rank, 0)
        for rank in range(self._plan.workers):
            self._start_worker(rank, 0)

    def _start_server(self, rank: int, life: int) -> None:
        folder, every = self._plan.checkpoint_dir, self._plan.checkpoint_every
        place = ["--checkpoint-dir", folder] if folder else []
        times = ["--checkpoint-every", every] if every is not None else []
        words: list[object] = [*place, *times]
        if self._plan.remote is None:  # else its host decides
            words += ["--bind", "tcp://127.0.0.1:0"]
            if config.text("KVPS_MEMORY_LIMIT", env=self._env_of("server")) is None:
                words += ["--memory-limit", share_bytes(self._plan.seats * (1 + self._plan.replicas))]
        self._start("server", rank, life, words)

    def _start_more_servers(self, count: int) -> None:
        """Let so many processes run that hold servers; those that are too many end by themselves."""
        here = {child.rank for child in self._children.values() if child.role == "server"}
        free = [rank for rank in range(max(count, self._plan.servers)) if rank not in here]
        for rank in free[: max(0, count - len(here))] if self._stage is LaunchStage.GOING else ():
            self._start_server(rank, 0)

    def _start_worker(self, rank: int, life: int) -> None:
        final = ["--no-replacement"] if life >= self._plan.max_restarts else []
        grace = [] if self._plan.grace_s is None else ["--grace", self._plan.grace_s]
        self._start("worker", rank, life, [*final, *grace, "--", *self._plan.command])

    def _start(self, role: str, rank: int, life: int, more: Sequence[object]) -> None:
        place = (
            []
            if role == "scheduler"
            else [
                "--scheduler",
                self._scheduler,
                "--rank",
                self._plan.ranks_of(rank) if role == "server" else rank,
            ]
        )
        is_bare = self._plan.is_keyless and self._plan.remote is not None
        bare = ["--insecure"] if is_bare or self._plan.is_http_insecure else []
        logged = ["--log-level", self._plan.log_level]
        if self._plan.log_format != "text":
            logged += ["--log-format", self._plan.log_format]
        words = [*place, *bare, *logged, *more]
        remote = None if role == "scheduler" else self._plan.remote
        number = self._number(role, rank)
        if remote is None:
            process = self._started_here(role, [str(word) for word in words])
            child = Child(role, rank, number, process, life)
        else:
            keys = self._sent_keys.get(role)
            if self._keys is not None:
                keys = Path(self._keys.path).read_text("ascii")
            own = self._plan.role_env.get(role, {})
            process = remote.start(role, rank, [str(word) for word in words], own, keys, self._reaper)
            child = Child(role, rank, number, process, life, remote.placement.host_of(role, rank))
            log.info("%s starts on host %s", child.name, child.host)
        self._children[process.pid] = child
        for fd in child.fds:
            self._listen(fd, partial(self._read, child, fd))

    def _number(self, role: str, rank: int) -> int:
        """Return the number of a process's colour."""
        return rank if role == "worker" else self._plan.workers + rank

    def _started_here(self, role: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        flags, fds = [], []
        if role != "server":
            flags += ["--report-fd", str(self._report[1])]
            fds.append(self._report[1])
        keys = self._plan.keys
        if self._keys is not None:
            keys = f"/dev/fd/{self._keys.fd}"
            fds.append(self._keys.fd)
        if keys is not None:
            flags += ["--keys", keys]
        # -P: a file in this folder that is called like one of our modules stays out of the way
        argv = [sys.executable, "-P", "-m", f"kvps.cli.{role}", *flags, *words]
        return start_here(argv, self._env_of(role), fds, self._reaper)

    def _env_of(self, role: str) -> dict[str, str]:
        """Return the environment of a role on this machine."""
        return {**self._plan.env, **self._plan.role_env.get(role, {})}

    # --- what they print ----------------------------------------------------------------------

    def _read(self, child: Child, fd: int) -> bool:
        """Show the output of one stream that can be read now; return whether there was any."""
        try:
            got = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not got:
            self._selector.unregister(fd)
        try:
            for sink, data in child.parts(fd, got):
                if sink != REPORT:
                    self._show(child, sink, child.lines[sink].feed(data))
                elif (words := data.split())[:1] == [b"worker"]:  # its process id is one of another host
                    self._on_worker_end(child, int(words[2]))
        except ValueError as error:
            log.error("%s: host %s sends no output of an agent: %s", child.name, child.host, error)
            child.abandon()
        if not got and child.host is None:
            sink = child.fds.index(fd)
            self._show(child, sink, child.lines[sink].end())
        return bool(got)

    def _show(self, child: Child, sink: int, lines: list[bytes]) -> None:
        if self._output.is_json:
            who = Speaker(child.role, child.rank)
            stream = ("stdout", "stderr")[sink]
            self._write(sink, b"", [wrapped(line, who, stream) for line in lines])
            return
        if sink == ERROR:
            lines = self._folder.feed(_who(child), lines, time.monotonic())
        prefix = self._output.prefix(child.name, child.number, sink)
        self._write(sink, prefix, lines, child.lines[sink].unfinished)

    def _write(self, sink: int, prefix: bytes, lines: list[bytes], unfinished: bytes = b"") -> None:
        try:
            self._output.write(sink, prefix, lines, unfinished)
        except BrokenPipeError:
            self._stop(signal.SIGPIPE)

    def _show_held(self, now: float) -> None:
        """Show lines that other processes had printed before, and the number of processes that have."""
        for shown in self._folder.on_time(now):
            role, rank, _ = shown.whose[0]
            self._write(ERROR, self._output.prefix(shown.name, self._number(role, rank), ERROR), shown.lines)

    def _tell(self, text: str) -> None:
        """Print a line of our own that belongs to the output, whatever the log level."""
        shown = logs.line("info", text, speaker(), {}) if self._output.is_json else text
        self._write(1, b"", [shown.encode()])

    def _drain(self, child: Child) -> None:
        """Show the rest of what a process printed that has ended."""
        for fd in child.fds:
            while fd in self._selector.get_map() and self._read(child, fd):
                pass
            if fd in self._selector.get_map():  # somebody who left its group holds it open
                self._selector.unregister(fd)
        for sink, lines in enumerate(child.lines):
            self._show(child, sink, lines.end())
        rest = self._folder.end(_who(child), time.monotonic())
        self._write(ERROR, self._output.prefix(child.name, child.number, ERROR), rest)
        child.close()

    # --- how they end -------------------------------------------------------------------------

    def _end(self, child: Child) -> None:
        """A process has ended."""
        pid, code = child.process.pid, child.process.returncode
        self._on_report()  # what it said before it ended
        del self._children[pid]
        self._reaper.forget(pid)
        self._drain(child)
        code = 128 - code if code < 0 else code
        if not child.has_begun and self._stage is LaunchStage.GOING:
            assert self._plan.remote is not None
            assert child.host is not None
            log.error(
                "%s: host %s could not start it (exit code %d): see whether this command ends with 0: %s",
                child.name,
                child.host,
                code,
                self._plan.remote.probe(child.host),
            )
            code = EXIT_CONFIG  # another attempt would end like this one
        log.log(logging.DEBUG if code == 0 else logging.INFO, "%s ended with %d", child.name, code)
        if child.role != "worker":
            self._on_other_end(child, code)
            return
        if not child.is_told:
            self._on_worker_end(child, code)
        if code and self._may_restart(child, code):
            self._start_worker(child.rank, child.life + 1)
        if not any(child.role == "worker" for child in self._children.values()):
            self._on_no_worker()

    def _on_worker_end(self, child: Child, code: int) -> None:
        """A worker's command has ended; the process that ran it will do so soon."""
        child.is_told = True
        if code == 0 or self._stage > LaunchStage.ENDING:
            return
        if self._may_restart(child, code):
            self._warn_of_restart(child, code)
            return
        self._worker_code = self._worker_code or code
        if self._stage is LaunchStage.DRAINING:
            self._give_up_draining(f"{child.name} ended with exit code {code}")
        elif self._stage is LaunchStage.GOING and self._goes_on:
            told = f"{child.name} ended with exit code {code}"
            log.error("%s; the others go on without it (on_worker_lost='shrink')", told)
        elif self._stage is not LaunchStage.ENDING:
            log.error("%s ended with exit code %d; ending the job", child.name, code)
            self._enter(LaunchStage.ENDING, OTHERS_MAX_S)

    def _follow_policy(self, goes_on: bool) -> None:
        """The workers have other stores now: they go on without a lost worker, or they do not."""
        self._goes_on = goes_on
        if goes_on and self._stage is LaunchStage.ENDING and not self._other_code:
            log.warning("the job goes on after all, without the lost worker (on_worker_lost='shrink')")
            self._enter(LaunchStage.GOING, None)

    def _may_restart(self, child: Child, code: int) -> bool:
        is_going = self._stage is LaunchStage.GOING
        return is_going and code != EXIT_CONFIG and child.life < self._plan.max_restarts

    def _is_kept(self, child: Child, code: int) -> bool:
        """Whether what a server or the scheduler knew is where its next life finds it."""
        if child.role == "server":
            has_copy = self._plan.replicas > 0
            return has_copy or self._plan.checkpoint_dir is not None or self._rebuilds
        return self._foothold is not None and self._foothold.has_job(code)

    def _warn_of_restart(self, child: Child, code: int) -> None:
        times = f"{child.life + 1} of {self._plan.max_restarts}"
        log.warning("%s ended with exit code %d; starting it again (%s)", child.name, code, times)

    def _on_other_end(self, child: Child, code: int) -> None:
        """A server or the scheduler has ended; with 0, the job was over for it."""
        if child.role == "scheduler" and self._stage is LaunchStage.DONE:
            self._enter(LaunchStage.DONE, LATE_MAX_S)
        if code == 0 or self._stage >= LaunchStage.STOPPING:  # by then everybody is asked to end
            return
        if self._is_kept(child, code) and self._may_restart(child, code):
            self._warn_of_restart(child, code)
            if child.role == "server":
                self._start_server(child.rank, child.life + 1)
            else:
                self._start_scheduler(child.life + 1)
            return
        if code == 1 and self._worker_code:  # the job is over for it, and a worker was lost for good
            return
        if child.role == "server" and self._plan.replicas and code != EXIT_CONFIG:
            # Its copy goes on; if that was not complete, the workers fail, and the job ends for that reason.
            log.warning(
                "%s ended with exit code %d and is not started again (--max-restarts)", child.name, code
            )
            return
        self._other_code = self._other_code or code
        if self._stage is LaunchStage.DRAINING:
            self._give_up_draining(f"{child.name} ended with exit code {code}")
        elif self._stage is LaunchStage.GOING:
            hint = self._why_scheduler_ended if child.role == "scheduler" else ""
            is_final = bool(self._plan.max_restarts) or code == EXIT_CONFIG
            if child.role == "scheduler" and not is_final:
                hint += " (with --max-restarts it would have been started again)"
            log.error("%s ended with exit code %d; ending the job%s", child.name, code, hint)
            self._enter(LaunchStage.ENDING, OTHERS_MAX_S)

    def _on_no_worker(self) -> None:
        """Servers and scheduler have nothing to do any more."""
        if self._stage <= LaunchStage.DRAINING:
            # Workers that were added by hand may go on.
            self._enter(LaunchStage.DONE, None if self._plan.most_workers else DONE_MAX_S)
        elif self._stage is LaunchStage.ENDING:
            self._enter(LaunchStage.STOPPING, STOP_MAX_S, signal.SIGTERM)
        elif self._stage is LaunchStage.STOPPING:
            self._signal(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        """The operator wants an end; the second time at once."""
        self._other_code = self._other_code or 128 + number
        if self._stage >= LaunchStage.STOPPING:
            self._enter(LaunchStage.KILLING, STOP_MAX_S, signal.SIGKILL)
            return
        is_asked = number == signal.SIGTERM or (number == signal.SIGINT and self._may_drain)
        if is_asked and self._stage is LaunchStage.GOING:
            self._grace_until = time.monotonic() + (self._plan.grace_s or 0.0)
            if self._may_drain:
                log.warning("asked to end: waiting for a last checkpoint")
                self._enter(LaunchStage.DRAINING, self._plan.grace_s, signal.SIGUSR2, "scheduler")
                return
        self._stop_members(number)

    @property
    def _may_drain(self) -> bool:
        has_time = self._plan.checkpoint_dir is not None and self._plan.grace_s is not None
        return has_time and any(child.role == "worker" for child in self._children.values())

    def _give_up_draining(self, why: str) -> None:
        log.warning("no last checkpoint: %s; ending the job", why)
        self._stop_members(signal.SIGTERM)

    def _stop_members(self, number: int) -> None:
        """Ask the commands to end; servers and scheduler follow."""
        left_s = max(0.0, self._grace_until - time.monotonic())
        has_range = any(child.role == "worker" for child in self._children.values())
        number = number if has_range and number == signal.SIGINT else signal.SIGTERM
        role = "worker" if has_range else None
        self._enter(LaunchStage.STOPPING, STOP_MAX_S + left_s, number, role)

    def _go_on(self) -> None:
        """The time of this stage is over."""
        if self._stage is LaunchStage.DRAINING:
            self._give_up_draining(f"it took more than {self._plan.grace_s:g} s")
            return
        names = ", ".join(child.name for child in self._children.values())
        is_late = self._stage is LaunchStage.DONE and "scheduler" not in names
        log.log(logging.INFO if is_late else logging.WARNING, "still running: %s", names)
        if self._stage is LaunchStage.ENDING:
            self._enter(LaunchStage.STOPPING, STOP_MAX_S, signal.SIGTERM, "worker")
        elif self._stage is LaunchStage.DONE:
            self._other_code = self._other_code or (0 if is_late else 1)
            self._enter(LaunchStage.STOPPING, STOP_MAX_S, signal.SIGTERM)
        elif self._stage is LaunchStage.STOPPING:
            self._enter(LaunchStage.KILLING, STOP_MAX_S, signal.SIGKILL)
        else:
            self._next_at = None
            for child in self._children.values():
                child.abandon()

    def _enter(
        self, stage: LaunchStage, limit_s: float | None, number: int | None = None, role: str | None = None
    ) -> None:
        """Begin a stage, for so long at most, and send a signal to the processes of a role, or to all."""
        self._stage = stage
        self._next_at = None if limit_s is None else time.monotonic() + limit_s
        if number is not None:
            self._signal(number, role)

    def _signal(self, number: int, role: str | None = None) -> None:
        """Send a signal to the processes of a role, or to all."""
        for child in self._children.values():
            if role in (None, child.role):
                child.signal(number)


def _who(child: Child) -> Who:
    return Who(child.role, child.rank, child.life)
