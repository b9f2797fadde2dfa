"""The calls of a training script on its worker core: one class each, beside its operation."""

from __future__ import annotations

from kvps.core.worker.calls.base import Call, OnTimeout, PushCall, ReadCall
from kvps.core.worker.calls.checkpoint import RejoinStore, RestoreCheckpoint, Restored, TakeCheckpoint
from kvps.core.worker.calls.collective import AskStatus, Compare, Flush, JoinStore, StandAtBarrier
from kvps.core.worker.calls.dense import (
    Allocate,
    Locate,
    PullValues,
    PushStep,
    PushValues,
    Sinks,
    Versions,
    Views,
)
from kvps.core.worker.calls.embeddings import (
    ExportBlock,
    MakeTable,
    PullTableRows,
    PushTableRows,
    SetTableRate,
)
from kvps.core.worker.calls.keys import Broadcast, Init, Lookup, OpenStore
from kvps.core.worker.calls.optimizer import (
    Compress,
    LoadResiduals,
    LoadState,
    SaveResiduals,
    SaveState,
    SetOptimizer,
    SetRate,
)
from kvps.core.worker.calls.publish import Publish
from kvps.core.worker.calls.refresh import Fresh, Refresh
from kvps.core.worker.calls.resume import EndReplay, EnterStore, PassOver, Place, TakePlace
from kvps.core.worker.calls.rows import PullKeyRows, PushKeyRows
