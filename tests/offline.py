"""An offline run of wandb, read back from its file: LevelDB log blocks of protobuf records."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path


def read_records(run_folder: Path) -> list:
    from wandb.proto import wandb_internal_pb2

    (path,) = run_folder.glob("run-*.wandb")
    data, at, parts, records = path.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # no room for a header: padding
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):  # half written
            break
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            records.append(record)
            parts = []
    return records


def values(items) -> dict:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


class Read:
    """An offline run: history, config as updated, summary, exit code, the bytes of all its files."""

    def __init__(self, save_dir: Path):
        (folder,) = (save_dir / "wandb").glob("offline-run-*")
        self.folder = folder
        deadline = time.monotonic() + 30
        while "exit" not in {r.WhichOneof("record_type") for r in read_records(folder)}:
            assert time.monotonic() < deadline, "the run has no end"
            time.sleep(0.02)  # wandb's service writes the last block after finish() has come back
        self.history, self.config, self.summary, self.exit_code, self.metrics = [], {}, {}, None, {}
        self.config_keys: list[str] = []
        for record in read_records(folder):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = values(record.history.item)
                self.history.append({k: v for k, v in row.items() if not k.startswith("_")})
            elif kind == "run":
                self.run = record.run
            elif kind == "config":
                update = values(record.config.update)
                self.config_keys += update
                self.config |= update
            elif kind == "summary":
                self.summary |= values(record.summary.update)
            elif kind == "metric":
                self.metrics[record.metric.name] = record.metric
            elif kind == "exit":
                self.exit_code = record.exit.exit_code
        files = [p for p in folder.rglob("*") if p.is_file() and "logs" not in p.parts]  # logs stay on the machine
        self.bytes = b"".join(p.read_bytes() for p in files)
