"""What the endpoints share."""

import time
from dataclasses import dataclass, field

from cygnet.api.card import ModelCard
from cygnet.api.generation import Generator
from cygnet.api.kv_events import KVEvents
from cygnet.api.lifecycle import Lifecycle
from cygnet.api.params import MAX_SEQUENCES, Limits
from cygnet.api.tokenization import Tokenizer, TokenizerPool
from cygnet.base.config import ApiSettings
from cygnet.base.engine_client import EngineClient
from cygnet.metrics.catalogue import RECORDED
from cygnet.metrics.prometheus import Exposition
from cygnet.metrics.recorder import Recorder


@dataclass
class Service:
    """One served model: its engine, tokenizer and settings, and the books kept about it."""

    engine: EngineClient
    tokenizer: Tokenizer
    settings: ApiSettings
    card: ModelCard
    lifecycle: Lifecycle = field(default_factory=Lifecycle)

    def __post_init__(self) -> None:
        self.pool = TokenizerPool(self.tokenizer)
        self.recorder = Recorder(RECORDED)
        self.exposition = Exposition(lambda: self.engine.stats, self.recorder, self.card.id)
        self.generator = Generator(self.engine, self.tokenizer, self.recorder)
        self.kv_events = KVEvents(self.engine, self.lifecycle)
        self.started = time.monotonic()
        ready = self.engine.ready
        self.limits = Limits(ready.max_model_len, ready.vocab_size, min(MAX_SEQUENCES, ready.max_requests))

    @property
    def has_lower_tiers(self) -> bool:
        """Whether KV is cached anywhere but on the device."""
        return len(self.engine.ready.tiers) > 1

    @property
    def healthy(self) -> bool:
        """Whether new requests can be served."""
        return self.engine.healthy and not self.lifecycle.draining.is_set()
