"""Which conversation carries out which of the user's calls."""

from __future__ import annotations

from kvps.core import calls, conversations, id_calls, refreshing, row_calls, saving
from kvps.core.catalogue import Catalogue
from kvps.core.conversations import Conversation, Values


def start(book: Catalogue, call: calls.Call, rows: Values) -> Conversation:
    """Return the conversation that carries ``call`` out."""
    match call:
        case calls.PushIds():
            return id_calls.push_ids(book, call)
        case calls.PullIds():
            return id_calls.pull_ids(book, call)
        case calls.ExportBlock():
            return id_calls.export(book, call)
        case calls.SetTableRate():
            return id_calls.set_table_rate(book, call)
        case calls.Embed():
            return id_calls.embed(book, call)
        case calls.PushValues():
            return conversations.push(book, call, rows)
        case calls.PullValues():
            return conversations.pull(book, call)
        case calls.PushRows():
            return row_calls.push_rows(book, call, rows)
        case calls.PullRows():
            return row_calls.pull_rows(book, call)
        case calls.Refresh():
            return refreshing.refresh(book, call)
        case calls.OpenStore():
            return conversations.open_store(book, call)
        case calls.Init():
            return conversations.init(book, call, rows)
        case calls.Broadcast():
            return conversations.broadcast(book, call, rows)
        case calls.Lookup():
            return conversations.lookup(book, call.keys)
        case calls.Allocate():
            return conversations.allocate(book, call.keys)
        case calls.Versions():
            return conversations.versions(book, call.keys)
        case calls.Resume():
            return conversations.resume(book, call.keys)
        case calls.SetOptimizer():
            return conversations.set_optimizer(book, call)
        case calls.SetRate():
            return conversations.set_rate(book, call)
        case calls.Stand():
            return conversations.barrier(book, call.name)
        case calls.JoinStore():
            return conversations.join(book)
        case calls.Flush():
            return conversations.flush()
        case calls.TakeCheckpoint():
            return saving.checkpoint(book, call)
        case calls.RestoreCheckpoint():
            return saving.restore(book, call)
        case calls.Ask():
            return conversations.status(book)
        case calls.SaveState():
            return conversations.save_state(book)
        case calls.LoadState():
            return conversations.load_state(book, call)
        case calls.Compress():
            return conversations.compress(book, call)
        case calls.SaveRests():
            return conversations.save_rests(book)
        case calls.LoadRests():
            return conversations.load_rests(book, call)
        case _:
            raise TypeError(f"no conversation for {type(call).__name__}")
