"""The operation of each call."""

from __future__ import annotations

from kvps.core.worker import calls
from kvps.core.worker.calls import (
    checkpoint,
    collective,
    dense,
    embeddings,
    keys,
    optimizer,
    refresh,
)
from kvps.core.worker.calls import rows as row_calls
from kvps.core.worker.calls.base import Conversation, Values
from kvps.core.worker.store import WorkerStore


def start(store: WorkerStore, call: calls.Call, rows: Values) -> Conversation:
    """Return the conversation that carries ``call`` out."""
    match call:
        case calls.PushTableRows():
            return embeddings.push_ids(store, call)
        case calls.PullTableRows():
            return embeddings.pull_ids(store, call)
        case calls.ExportBlock():
            return embeddings.export(store, call)
        case calls.SetTableRate():
            return embeddings.set_table_rate(store, call)
        case calls.MakeTable():
            return embeddings.embed(store, call)
        case calls.PushValues():
            return dense.push(store, call, rows)
        case calls.PullValues():
            return dense.pull(store, call)
        case calls.PushKeyRows():
            return row_calls.push_rows(store, call, rows)
        case calls.PullKeyRows():
            return row_calls.pull_rows(store, call)
        case calls.Refresh():
            return refresh.refresh(store, call)
        case calls.OpenStore():
            return keys.open_store(store, call)
        case calls.Init():
            return keys.init(store, call, rows)
        case calls.Broadcast():
            return keys.broadcast(store, call, rows)
        case calls.Lookup():
            return keys.lookup(store, call.keys)
        case calls.Allocate():
            return dense.allocate(store, call.keys)
        case calls.Versions():
            return dense.versions(store, call.keys)
        case calls.ResumeKeys():
            return dense.resume(store, call.keys)
        case calls.SetOptimizer():
            return optimizer.set_optimizer(store, call)
        case calls.SetRate():
            return optimizer.set_rate(store, call)
        case calls.StandAtBarrier():
            return collective.barrier(store, call.name, failure=call.failure)
        case calls.JoinStore():
            return collective.join(store)
        case calls.Flush():
            return collective.flush()
        case calls.TakeCheckpoint():
            return checkpoint.checkpoint(store, call)
        case calls.RestoreCheckpoint():
            return checkpoint.restore(store, call)
        case calls.AskStatus():
            return collective.status(store)
        case calls.SaveState():
            return optimizer.save_state(store)
        case calls.LoadState():
            return optimizer.load_state(store, call)
        case calls.Compress():
            return optimizer.compress(store, call)
        case calls.SaveRests():
            return optimizer.save_rests(store)
        case calls.LoadRests():
            return optimizer.load_rests(store, call)
        case _:
            raise TypeError(f"no conversation for {type(call).__name__}")
