"""Rows with images and videos in files, and the datasets that read them."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from lockstep.config.data import DataConfig
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.models.processor import hf_processor
from lockstep.models.tokenizer import hf_tokenizer

ANSWER = {"data_source": "x", "reward_model": {"style": "rule", "ground_truth": "1"}}


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def write(folder: Path, *rows: dict[str, Any], kind: str = "parquet") -> str:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([ANSWER | row for row in rows]), path)
    else:
        path.write_text("".join(json.dumps(ANSWER | row) + "\n" for row in rows))
    return str(path)


def dataset_of(model: Path, file: str, config: DataConfig | None = None, cls: Any = RLHFDataset) -> Any:
    config = config or DataConfig()
    tokenizer = hf_tokenizer(model)
    return cls(file, tokenizer, config, hf_processor(model, tokenizer, config))
