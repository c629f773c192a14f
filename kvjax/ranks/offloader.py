"""An offloader that decides as those of the other ranks do."""

import hashlib
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, overload

import jax

from kvjax._checks import instance, seconds, shown
from kvjax.chunking import Chunking
from kvjax.handles import Lookup
from kvjax.jobs import Job, JobResult
from kvjax.jobs.waiter import LONGEST_SLEEP_S, after
from kvjax.offloader import Offloader
from kvjax.ranks.channel import Channel, RanksDifferError, RanksError
from kvjax.ranks.coordination import CoordinationChannel
from kvjax.ranks.gate import Gate, GatedLoad
from kvjax.ranks.lookups import about, agreed, described, hits_differ, said, sets_of_others
from kvjax.ranks.messages import bodies, encode, failures

# Lookups that did not agree are made anew with the sets of all ranks so often; the last time, nothing is restored.
_TURNS = 3


class RankedOffloader:
    """One rank's offloader, kept in step with those of the other ranks of the model.

    All ranks make the same calls in the same order, from one thread each. What they decide is the same on every rank:
    a hit is a position that all of them can restore, and a load went well only if it did on all. They agree by a few
    bytes over a channel beside the devices: no program of theirs waits for it. Only `lookup`, `lookup_all`, and, while
    there are loads on which they have not agreed, `poll` and `wait` exchange anything.

    After a `RanksError` nothing but `close` can be called.

    Args:
        offloader: of this rank, made with the same options as the others.
        channel: to the other ranks; by default the coordination service of `jax.distributed`.
        timeout_s: how long a rank waits for the others, in seconds, beyond what a call may take by itself.

    Raises:
        ValueError: an argument of the wrong type or range.
        RanksError: the others did not come, or have other options.
    """

    def __init__(self, offloader: Offloader, channel: Channel | None = None, *, timeout_s: float = 30.0):
        limit = seconds(timeout_s, "timeout_s")
        if not limit:
            raise ValueError(f"`timeout_s` must be a positive number of seconds, got {shown(timeout_s)}")
        self._timeout_s = limit
        self.offloader = instance(offloader, Offloader, "offloader")
        self.channel = CoordinationChannel() if channel is None else channel
        self._broken: BaseException | None = None
        self._calls = hashlib.blake2b(digest_size=8)
        self._open: list[GatedLoad] = []
        self._ended: list[Job] = []
        self._loadable: set[Hashable] = set()  # requests whose last lookup found something to load
        self._numbers: dict[Hashable, int] = {}  # requests in the order of their lookups, the same on every rank
        self._looked_up = 0
        self._raised = ""  # what a call that exchanges nothing raised here, until the ranks know that it did for all
        self._together("start", lambda: ({**described(offloader), "timeout_s": limit}, None))

    @property
    def chunking(self) -> Chunking:
        """How this rank's part of the cache is cut into chunks; the same tokens on every rank."""
        return self.offloader.chunking

    # --- a request ------------------------------------------------------------------------------------

    def lookup(self, request_id: Hashable, token_ids: Any = None, **options: Any) -> Lookup:
        """Registers a request on all ranks and finds the longest prefix that all of them can restore.

        Args:
            request_id: as for `Offloader.lookup`.
            token_ids: the whole prompt.
            **options: as for `Offloader.lookup`, all but `ranks`.

        Returns:
            As `Offloader.lookup` does. `hit_tokens`, `load`, `checkpoints` and `arriving` are the same on every rank.

        Raises:
            ValueError: see `Offloader.lookup`.
            RanksError: the ranks cannot decide together.
        """
        return self.lookup_all({request_id: {"token_ids": token_ids, **options}})[request_id]

    def lookup_all(self, requests: Mapping[Hashable, Mapping[str, Any]]) -> dict[Hashable, Lookup]:
        """Looks up several requests with no more exchanges than one takes.

        Args:
            requests: by request id, the arguments of `Offloader.lookup`, all but `ranks`.

        Raises:
            ValueError: see `Offloader.lookup`. Then none of the requests is known.
            RanksError: the ranks cannot decide together.
        """
        if not isinstance(requests, Mapping) or not all(isinstance(one, Mapping) for one in requests.values()):
            raise ValueError(f"`requests` must hold the arguments of `lookup` by request id, got {shown(requests)}")
        for request_id, options in requests.items():
            if "ranks" in options:
                raise ValueError(f"`ranks` must not be given, they are asked for, got some for request {request_id!r}")
        waits = [seconds(options.get("wait_s"), "wait_s") for options in requests.values()]
        wait_s = sum(self.offloader.tier_wait_s if wait is None else wait for wait in waits)
        found: dict[Hashable, Lookup] = {}

        def look() -> tuple[Any, Any]:
            try:
                for request_id, options in requests.items():
                    found[request_id] = self.offloader.lookup(request_id, **options)
                return [about(one, options) for one, options in requests.items()], [*map(said, found.values())]
            except BaseException:
                for request_id in found:
                    self.offloader.finish(request_id)
                    self._forget(request_id)
                raise

        words = self._by_request(requests, self._together("lookup", look, wait_s))
        for turn in range(_TURNS):
            differing = [request_id for request_id, of_ranks in words.items() if hits_differ(of_ranks)]
            if not differing:
                break
            again = self._look_again(differing, nothing=turn == _TURNS - 1)
            found |= again
            told = self._together("look again", lambda again=again: (None, [said(one) for one in again.values()]))
            words |= self._by_request(again, told)
        for request_id, of_ranks in words.items():
            if hits_differ(of_ranks):
                raise self._break(RanksDifferError(f"the ranks hold other prefixes of {request_id!r} on their devices"))
            found[request_id] = agreed(found[request_id], of_ranks)
            self.offloader.add_checkpoints(request_id, found[request_id].checkpoints)
            self._numbers[request_id], self._looked_up = self._looked_up, self._looked_up + 1
            wants = any(len(chunks) for chunks in found[request_id].load.values())
            (self._loadable.add if wants else self._loadable.discard)(request_id)
        return found

    def load(
        self,
        caches: Mapping[str, jax.Array],
        request_id: Hashable,
        block_tables: Mapping[str, Any],
        *,
        share: bool = False,
        deadline_s: float | None = None,
    ) -> tuple[dict[str, jax.Array], Job]:
        """Starts to restore the hit of the last `lookup`; see `Offloader.load`.

        The job has a result once `poll` or `wait` has found that all ranks have one. What is stored of the request
        meanwhile is kept only if the load went well on all of them.
        """
        limit = seconds(deadline_s, "deadline_s")
        limit = self.offloader.deadline_s if limit is None else limit
        self._note("load", self._number(request_id), share, limit)
        gates: list[Gate] = []

        def gated(transfer: Any) -> Gate:
            gates.append(Gate(transfer))
            return gates[-1]

        try:
            if request_id not in self._loadable:
                return self.offloader.load(caches, request_id, block_tables, share=share)
            caches, job = self.offloader.start_load(
                caches, request_id, block_tables, share=share, deadline_s=math.inf, around=gated
            )
        except BaseException as error:
            self._note("raised", type(error).__name__)
            self._raised = f"the load of {request_id!r} raised {type(error).__name__}: {error}"
            raise
        load: Any = job.work
        shared = tuple(one for one in self._open if one.load in load.after)
        self._open.append(GatedLoad(job, load, gates[0], shared, limit))
        return caches, job

    def store(
        self,
        caches: Mapping[str, jax.Array],
        request_id: Hashable,
        block_tables: Mapping[str, Any],
        num_tokens: int,
        *,
        checkpoint: bool = False,
        deadline_s: float | None = None,
    ) -> tuple[dict[str, jax.Array], Job]:
        """Starts to store this rank's part; see `Offloader.store`. The job's result is this rank's own: what one rank
        failed to store is found by none."""
        self._note("store", self._number(request_id), num_tokens, checkpoint)
        return self.offloader.store(
            caches, request_id, block_tables, num_tokens, checkpoint=checkpoint, deadline_s=deadline_s
        )

    def extend(self, request_id: Hashable, token_ids: Any = None, **options: Any) -> None:
        """Adds accepted tokens to a request; see `Offloader.extend`."""
        self._note("extend", self._number(request_id))
        self.offloader.extend(request_id, token_ids, **options)

    def next_cut(self, request_id: Hashable, position: int) -> int | None:
        """Returns where a request must end a step, the same on every rank; see `Offloader.next_cut`."""
        return self.offloader.next_cut(request_id, position)

    def finish(self, request_id: Hashable) -> None:
        """Forgets a request; see `Offloader.finish`."""
        self._note("finish", self._number(request_id))
        self.offloader.finish(request_id)
        self._forget(request_id)

    # --- jobs -----------------------------------------------------------------------------------------

    def poll(self) -> list[JobResult]:
        """Returns the results of loads on which all ranks agree by now, each once, the same on every rank.

        Those of stores are this rank's own, and are not among them.

        Raises:
            RanksError: the ranks cannot decide together.
        """
        self._check()
        if self._open or self._raised:
            self._agree("poll")
        self.offloader.poll()
        return self._told()

    @overload
    def wait(self, job: Job, *, timeout_s: float | None = None) -> JobResult: ...

    @overload
    def wait(self, job: None = None, *, timeout_s: float | None = None) -> list[JobResult]: ...

    def wait(self, job: Job | None = None, *, timeout_s: float | None = None) -> JobResult | list[JobResult]:
        """Waits for a job, or for all of them; see `Offloader.wait`. For all, the results are those of loads.

        Raises:
            ValueError: the job is not one of this offloader.
            TimeoutError: they did not end in time, here or, of loads, on another rank; they go on.
            RanksError: the ranks cannot decide together.
        """
        self._check()
        limit = seconds(timeout_s, "timeout_s")
        until = after(limit)
        waited = self._before(job)
        while waited or self._raised:
            # In turns, so that ranks whose loads have ended hear that those of others go on, and do not call them lost.
            turn = time.monotonic() + self._timeout_s / 2
            for one in waited:
                one.wait(turn if until is None else min(turn, until), LONGEST_SLEEP_S)
            over = self._agree("wait", late=until is not None and time.monotonic() >= until)
            waited = [one for one in waited if one in self._open]
            if waited and over:
                raise TimeoutError(f"loads did not end on all ranks in {timeout_s} s")
        left = None if until is None else max(0.0, until - time.monotonic())
        if job is not None:
            self._ended = [ended for ended in self._ended if ended is not job]
            return self.offloader.wait(job, timeout_s=left)
        self.offloader.wait(timeout_s=left)
        return self._told()

    def cancel(self, job: Job) -> bool:
        """Gives a job up on all ranks; see `Offloader.cancel`."""
        if not isinstance(job, Job):
            raise ValueError(f"`job` must be one of this offloader, got {shown(job)}")
        self._note("cancel", self._number(job.request_id), job.operation)
        given_up = self.offloader.cancel(job)
        for one in self._before(job):
            if one.job is job:
                self._conclude(one, good=False)
        return given_up

    # --- all of it ------------------------------------------------------------------------------------

    def invalidate(self, namespace: bytes | None = None) -> int:
        """Makes every chunk of this rank a miss, or those of one namespace; see `Offloader.invalidate`."""
        self._note("invalidate", namespace is None)
        return self.offloader.invalidate(namespace)

    def update_model(self, model: str) -> None:
        """Says that the weights are others from now on; see `Offloader.update_model`."""
        self._note("update_model", model)
        self.offloader.update_model(model)

    def close(self, *, timeout_s: float | None = None, flush: bool = True) -> None:
        """Gives up the loads on which the ranks have not agreed, and closes this rank's offloader; see
        `Offloader.close`. It waits for no other rank."""
        for one in list(self._open):
            if self.offloader.is_open:
                self.offloader.cancel(one.job)
            self._conclude(one, good=False)
        self.offloader.close(timeout_s=timeout_s, flush=flush)

    def __enter__(self) -> "RankedOffloader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parts ----------------------------------------------------------------------------------------

    def _by_request(self, requests: Iterable[Hashable], of_ranks: list[Any]) -> dict[Hashable, Any]:
        """What all ranks have to say of each request."""
        return dict(zip(requests, zip(*of_ranks, strict=True), strict=True))

    def _look_again(self, requests: list[Hashable], *, nothing: bool) -> dict[Hashable, Lookup]:
        """Finds what this rank has where all could resume; or settles for nothing but what the device holds."""

        def sets() -> tuple[Any, Any]:
            return None, [self.offloader.resumable(request_id).to_bytes().hex() for request_id in requests]

        words = self._by_request(requests, self._together("resumable", sets))
        return {
            request_id: self.offloader.look_again(
                request_id,
                ranks=sets_of_others(words[request_id], self.channel.rank),
                max_load_tokens=0 if nothing else None,
            )
            for request_id in requests
        }

    def _before(self, job: Job | None) -> list[GatedLoad]:
        """The loads without a verdict up to a job, in the order of their issue; all of them for `None`."""
        return [one for one in self._open if job is None or one.job.job_id <= job.job_id]

    def _agree(self, call: str, *, late: bool = False) -> bool:
        """Ends the loads that ended on all ranks, and returns whether one of them does not wait any longer.

        Args:
            call: in which they agree.
            late: whether this rank does not.
        """
        of_ranks = self._together(
            call, lambda: (None, [late, *(one.says() for one in self._open)]), self._timeout_s / 2
        )
        over = any(words[0] for words in of_ranks)
        of_ranks = [words[1:] for words in of_ranks]
        good: list[GatedLoad] = []
        for one, words in zip(list(self._open), zip(*of_ranks, strict=True), strict=True):
            verdict = one.verdict(words)
            if verdict is None:
                continue
            if verdict:
                self.offloader.cancel(one.job, why=verdict)
            else:
                good.append(one)
            self._conclude(one, good=not verdict)
            self._ended.append(one.job)
        self.offloader.see_ended()
        for one in good:
            if one.job.ended is None or not one.job.ended.ok:
                raise self._break(
                    RanksDifferError(f"a load of {one.job.request_id!r} ended otherwise on rank {self.channel.rank}")
                )
        return over

    def _conclude(self, one: GatedLoad, *, good: bool) -> None:
        one.failed = not good
        one.gate.open(good=good)
        self._open.remove(one)

    def _told(self) -> list[JobResult]:
        ended, self._ended = self._ended, []
        return [job.result for job in ended if job.result is not None]

    def _note(self, call: str, *what: Any) -> None:
        """Remembers a call that exchanges nothing: the next exchange finds out if other ranks made others."""
        self._check()
        self._calls.update(repr((call, *what)).encode())

    def _number(self, request_id: Hashable) -> int | None:
        """The number of a request; `None` for one that was not looked up."""
        return self._numbers.get(request_id) if isinstance(request_id, Hashable) else None

    def _forget(self, request_id: Hashable) -> None:
        self._loadable.discard(request_id)
        self._numbers.pop(request_id, None)

    def _together(self, call: str, work: Callable[[], tuple[Any, Any]], wait_s: float = 0.0) -> list[Any]:
        """Does this rank's part of a call, and returns what every rank has to say of its own.

        Args:
            call: its name.
            work: returns what the call is about, which must be the same on every rank, and what this rank has to say.
            wait_s: how long the work may take on another rank, in seconds.
        """
        self._check()
        try:
            of, words = work()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            messages = self._exchange(encode(call, None, None, failure=failure), wait_s)
            if not all(failures(messages)):
                self._break(RanksDifferError(f"rank {self.channel.rank} failed in {call!r} where others did not"))
            raise
        messages = self._exchange(encode(call, [self._calls.hexdigest(), of], words, raised=self._raised), wait_s)
        try:
            agreed_on = bodies(messages, self.channel.rank)
        except RanksError as error:
            raise self._break(error) from None
        self._raised = ""
        return agreed_on

    def _exchange(self, message: bytes, wait_s: float) -> list[bytes]:
        try:
            return self.channel.exchange(message, self._timeout_s + wait_s)
        except BaseException as error:  # whatever it is: nobody knows what the others have heard
            self._break(error)
            raise

    def _break(self, error: BaseException) -> BaseException:
        self._broken = error
        return error

    def _check(self) -> None:
        if self._broken is not None:
            raise RanksError(f"the ranks must be made anew after an error: {self._broken}") from self._broken
