"""Reading what Weights & Biases wrote offline: a log in LevelDB's format whose entries are protobuf messages."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7
_FULL, _LAST = 1, 4


def read_run(folder: Path) -> dict[str, Any]:
    """Group, name, configuration, summary, history and names of system metrics of one offline run's folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("*.wandb")
    run: dict[str, Any] = {"config": {}, "summary": {}, "history": [], "system": set()}
    for entry in _entries(file.read_bytes()):
        record = Record()
        record.ParseFromString(entry)
        if record.HasField("run"):
            run |= {"group": record.run.run_group, "name": record.run.display_name, "project": record.run.project}
            run["config"] |= _items(record.run.config.update)
        elif record.HasField("config"):
            run["config"] |= _items(record.config.update)
        elif record.HasField("summary"):
            run["summary"] |= _items(record.summary.update)
        elif record.HasField("history"):
            run["history"].append(_items(record.history.item))
        elif record.HasField("stats"):
            run["system"] |= {item.key for item in record.stats.item}
    return run


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _entries(data: bytes) -> Iterator[bytes]:
    at, parts = _FILE_HEADER, []
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        at += _HEADER
        parts.append(data[at : at + length])
        at += length
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = []
