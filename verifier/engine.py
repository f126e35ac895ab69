"""The round: schedule, collect drafts, run the target once, verify, commit, tell the drafters.

Axes: B requests of a round that draw a token, N their drafts, T packed rows, V columns.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence

from torch import Tensor

from outrider.kernels.dispatch import sampler_for
from outrider.kernels.rejection import Verification
from outrider.protos.messages import FeatureSpec, MalformedMessage, RequestClose, VerdictBatch
from outrider.protos.sampling import InvalidField
from outrider.verifier import admission, packing
from outrider.verifier.counters import Counters
from outrider.verifier.drafts import Chain, Matched, match, wanted
from outrider.verifier.features import FeatureExtractor
from outrider.verifier.kv_cache import BlockAllocator, KVPool, plan_blocks
from outrider.verifier.link import DraftLink, NullLink
from outrider.verifier.request import Request
from outrider.verifier.scheduler import Scheduler, Work
from outrider.verifier.target import ForwardOutput, Target
from outrider.verifier.types import (
    BONUS,
    PLAIN,
    RECOVERED,
    EngineConfig,
    EngineStats,
    GenerationRequest,
    TokenOutput,
)

logger = logging.getLogger(__name__)


class Engine:
    """Generates for many requests at once with one target; belongs to one thread."""

    def __init__(
        self, target: Target, config: EngineConfig | None = None, link: DraftLink | None = None
    ) -> None:
        self.target = target
        self.config = config or EngineConfig()
        self.link: DraftLink = link or NullLink()
        if self.config.method != "rejection":
            raise InvalidField("method", self.config.method, "this version serves rejection")
        self.max_context = admission.context_limit(self.config, target.max_positions)
        num_blocks = plan_blocks(
            target.kv_shape, self.config.kv_bytes, self.config.block_size, self.max_context
        )
        self.pool = KVPool(target.kv_shape, num_blocks, self.config.block_size, target.device)
        target.attach_cache(self.pool)
        self.allocator = BlockAllocator(num_blocks)
        self.scheduler = Scheduler(self.config, self.allocator, self.max_context)
        self._sampler = sampler_for(target.device)
        self._extractor: FeatureExtractor | None = None
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count(1)
        self._finished: list[TokenOutput] = []  # cancelled since the last round
        self._counters = Counters()

    def step(self) -> list[TokenOutput]:
        """One round for every request that is due; what became certain of their answers."""
        self._adopt_feature_spec()
        work = self._schedule()
        outputs, self._finished = self._finished, []
        if not work:
            return outputs
        chains = self._collect(work)
        forward = self.target.forward(packing.pack(work, chains), self._features_for(work))
        verification = self._verify(forward.logits, work, chains)
        outputs += self._commit(work, chains, verification)
        self._send(work, chains, forward)
        return outputs

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request.

        Raises:
            InvalidField: it cannot be served; names the field, the value and the remedy.
            QueueFull: try again later.
        """
        limits = admission.Limits(
            vocab_size=self.target.vocab_size,
            max_context=self.max_context,
            has_text=self.target.tokenizer is not None,
        )
        admission.check(request, limits, running=request.request_id in self._requests)
        admitted = admission.admit(
            request, next(self._numbers), self.target, self.config, self.max_context
        )
        self.scheduler.add(admitted)
        self._requests[request.request_id] = admitted

    def cancel(self, request_id: str) -> None:
        """Ends a request; the next round says so. An unknown id is ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = "cancelled"
            self._finished.append(self._finish(request, 0, 0))

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._requests or self._finished)

    @property
    def stats(self) -> EngineStats:
        """The counters so far."""
        return self._counters.snapshot(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks_used=self.allocator.used,
            kv_blocks_total=self.allocator.total,
        )

    def check_integrity(self) -> None:
        """Asserts what has to hold between rounds."""
        self.scheduler.check_integrity()
        assert {id(r) for r in self.scheduler} == {id(r) for r in self._requests.values()}
        for request in self.scheduler.running:
            decoding = request.num_output > len(request.source.output_ids)
            assert not decoding or request.computed == request.committed - 1 or not request.asked
            assert request.asked <= request.draft_room

    def _adopt_feature_spec(self) -> None:
        """Another head needs other features: its requests are run again from their beginning."""
        spec = self.link.take_feature_spec()
        if spec is None:
            return
        self._extractor = self._make_extractor(spec)
        for request in reversed(self.scheduler.running.copy()):
            if request.num_speculative_tokens:
                self.scheduler.preempt(request)
                self._end_life(request)

    def _make_extractor(self, spec: FeatureSpec) -> FeatureExtractor | None:
        target = self.target
        try:
            spec.validate(target.num_layers, target.hidden_size)
        except MalformedMessage as error:
            logger.error("a head is refused, decoding goes on without: %s", error)
            return None
        return FeatureExtractor(spec, target.norm_eps, target.dtype, target.device)

    def _schedule(self) -> tuple[Work, ...]:
        schedule = self.scheduler.next()
        for request in schedule.preempted:
            self._counters.preemptions += 1
            self._end_life(request)
        for item in schedule.work:
            request = item.request
            if self._extractor is not None and item.start == 0 and request.draft_room:
                self.link.open(packing.opening(request, self.config.method))
                request.opened = True
        return schedule.work

    def _end_life(self, request: Request) -> None:
        if request.opened:
            self.link.close(RequestClose(request.number, request.epoch))
        request.begin_again()

    def _collect(self, work: Sequence[Work]) -> list[Chain | None]:
        """Each request's drafts; None where it has none and decodes plainly."""
        asking = [item.request for item in work if item.request.asked]
        matched = Matched({}, 0, 0, 0, 0, 0)
        if asking:
            deadline = time.monotonic() + self.config.draft_deadline_s
            drafts = self.link.collect(wanted(asking), deadline)
            matched = match(drafts, asking, self.target.vocab_size)
        self._counters.collected(matched)
        return [matched.chains.get(item.request.number) for item in work]

    def _features_for(self, work: Sequence[Work]) -> frozenset[int]:
        if self._extractor is None or not any(item.request.opened for item in work):
            return frozenset()
        return self._extractor.layers

    def _verify(
        self, logits: Tensor, work: Sequence[Work], chains: Sequence[Chain | None]
    ) -> Verification | None:
        drawing = [
            (item.request, chain) for item, chain in zip(work, chains, strict=True) if item.samples
        ]
        if not drawing:
            return None
        return self._sampler.verify(
            packing.processed(logits, drawing),
            packing.draft_tokens(drawing, self.target.device),
            packing.row_parameters(drawing, self.target.device),
            packing.draw_keys(drawing, self.target.device),
            self.target.vocab_size,
        )

    def _commit(
        self,
        work: Sequence[Work],
        chains: Sequence[Chain | None],
        verification: Verification | None,
    ) -> list[TokenOutput]:
        """Adds the verified tokens and rolls lengths back to what was accepted."""
        verdicts = packing.verdicts(verification)
        outputs = []
        for item, chain in zip(work, chains, strict=True):
            request = item.request
            request.computed = item.start + item.rows
            if request.pending:
                continue
            accepted, next_token, failed = next(verdicts)
            request.asked = 0
            if failed:
                outputs.append(self._fail(request))
                continue
            drafts = [] if chain is None else chain.token_ids[:accepted].tolist()
            request.computed += accepted
            self._counters.verified(0 if chain is None else len(chain.token_ids), accepted)
            last = PLAIN if chain is None else BONUS
            if chain is not None and accepted < len(chain.token_ids):
                last = RECOVERED
            for place, token in enumerate([*drafts, next_token], start=1):
                request.commit(token, place if place <= accepted else last)
                self._counters.tokens += 1
                if request.finish_reason is not None:
                    break
            outputs += self._told(request, 0 if chain is None else len(chain.token_ids), accepted)
        self._counters.round(any(chains), verification is not None)
        return outputs

    def _told(self, request: Request, drafted: int, accepted: int) -> list[TokenOutput]:
        if request.finish_reason is not None:
            return [self._finish(request, drafted, accepted)]
        output = request.output(drafted, accepted)
        return [output] if output.token_ids or output.text else []

    def _fail(self, request: Request) -> TokenOutput:
        self.pool.clear(request.blocks)
        request.finish_reason = "error"
        return self._finish(
            request, 0, 0, "the target's logits are not finite; the request cannot go on"
        )

    def _finish(
        self, request: Request, drafted: int, accepted: int, error: str | None = None
    ) -> TokenOutput:
        if request.opened:
            self.link.close(RequestClose(request.number, request.epoch))
        self.scheduler.remove(request)
        del self._requests[request.source.request_id]
        return request.output(drafted, accepted, error)

    def _send(
        self, work: Sequence[Work], chains: Sequence[Chain | None], forward: ForwardOutput
    ) -> None:
        """Features and known tokens of this round, for the requests that go on drafting."""
        extractor = self._extractor
        told = packing.to_tell(work, chains)
        if extractor is None or not told:
            return
        index = packing.feature_rows(told, self.target.device)
        verdicts: VerdictBatch = packing.verdict_batch(
            told,
            extractor.rows(forward.states, index),
            service=self.config.service,
            sender=self.config.sender,
            round_number=self._counters.rounds,
            head_version=extractor.spec.head_version,
        )
        for item in told:
            item.request.asked = item.request.draft_room if item.drawn else 0
        self._counters.sent(verdicts)
        self.link.send(verdicts)
