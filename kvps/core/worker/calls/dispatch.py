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


def start(book: WorkerStore, call: calls.Call, rows: Values) -> Conversation:
    """Return the conversation that carries ``call`` out."""
    match call:
        case calls.PushTableRows():
            return embeddings.push_ids(book, call)
        case calls.PullTableRows():
            return embeddings.pull_ids(book, call)
        case calls.ExportBlock():
            return embeddings.export(book, call)
        case calls.SetTableRate():
            return embeddings.set_table_rate(book, call)
        case calls.MakeTable():
            return embeddings.embed(book, call)
        case calls.PushValues():
            return dense.push(book, call, rows)
        case calls.PullValues():
            return dense.pull(book, call)
        case calls.PushKeyRows():
            return row_calls.push_rows(book, call, rows)
        case calls.PullKeyRows():
            return row_calls.pull_rows(book, call)
        case calls.Refresh():
            return refresh.refresh(book, call)
        case calls.OpenStore():
            return keys.open_store(book, call)
        case calls.Init():
            return keys.init(book, call, rows)
        case calls.Broadcast():
            return keys.broadcast(book, call, rows)
        case calls.Lookup():
            return keys.lookup(book, call.keys)
        case calls.Allocate():
            return dense.allocate(book, call.keys)
        case calls.Versions():
            return dense.versions(book, call.keys)
        case calls.ResumeKeys():
            return dense.resume(book, call.keys)
        case calls.SetOptimizer():
            return optimizer.set_optimizer(book, call)
        case calls.SetRate():
            return optimizer.set_rate(book, call)
        case calls.StandAtBarrier():
            return collective.barrier(book, call.name, failure=call.failure)
        case calls.JoinStore():
            return collective.join(book)
        case calls.Flush():
            return collective.flush()
        case calls.TakeCheckpoint():
            return checkpoint.checkpoint(book, call)
        case calls.RestoreCheckpoint():
            return checkpoint.restore(book, call)
        case calls.AskStatus():
            return collective.status(book)
        case calls.SaveState():
            return optimizer.save_state(book)
        case calls.LoadState():
            return optimizer.load_state(book, call)
        case calls.Compress():
            return optimizer.compress(book, call)
        case calls.SaveRests():
            return optimizer.save_rests(book)
        case calls.LoadRests():
            return optimizer.load_rests(book, call)
        case _:
            raise TypeError(f"no conversation for {type(call).__name__}")
