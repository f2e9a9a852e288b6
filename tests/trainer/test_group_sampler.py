"""Asynchronous sampling with a scripted rollout: order, overlap of generation and rewards, cuts, failures."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.generation import Completion, GenerationRequest
from lockstep.rewards.errors import AllRowsFailedError
from lockstep.trainer.ppo.async_sampling import AsyncSampling, Selection
from lockstep.trainer.ppo.group_scorer import GroupScorer
