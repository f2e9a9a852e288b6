"""A program written on verl: rollouts in a DataProto, scored, filtered by group, balanced and split for workers."""

import sys

import numpy as np
import torch
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import kl_penalty
from verl.trainer.ppo.ray_trainer import compute_advantage, compute_response_mask
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.model import compute_position_id_with_mask
from verl.utils.py_functional import append_to_dict
from verl.utils.reward_score import gsm8k
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.torch_functional import masked_mean, pad_2d_list_to_length, postprocess_data


class LengthWorker(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def lengths(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"length": data.batch["attention_mask"].sum(-1)})


def rollouts(prompts: DataProto, tokenizer, answers: list[str]) -> DataProto:
    """One response per row, from a list instead of a model."""
    responses = pad_2d_list_to_length([tokenizer.encode(answer) for answer in answers], tokenizer.pad_token_id)
    mask = (responses != tokenizer.pad_token_id).long()
    input_ids = torch.cat([prompts.batch["input_ids"], responses], dim=-1)
    attention_mask = torch.cat([prompts.batch["attention_mask"], mask], dim=-1)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts.batch["input_ids"],
            "responses": responses,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": compute_position_id_with_mask(attention_mask),
        }
    )


def main(model, files, n=4):
    tokenizer = hf_tokenizer(model)
    dataset = RLHFDataset(files, tokenizer, {"max_prompt_length": 32, "prompt_key": "prompt", "truncation": "left"})
    batch = DataProto.from_single_dict(collate_fn([dataset[i] for i in range(3)]))
    batch.non_tensor_batch["uid"] = np.array([f"prompt {i}" for i in range(3)], dtype=object)
    gen_batch = batch.pop(batch_keys=["input_ids", "attention_mask", "position_ids"])
    gen_batch = gen_batch.repeat(n, interleave=True)
    truths = [row["ground_truth"] for row in batch.non_tensor_batch["reward_model"]]
    answers = [f"#### {truth}" if k % (i + 1) == 0 else "#### 99" for i, truth in enumerate(truths) for k in range(n)]
    batch = batch.repeat(n, interleave=True).union(rollouts(gen_batch, tokenizer, answers))

    batch.batch["response_mask"] = compute_response_mask(batch)
    rewards = torch.zeros_like(batch.batch["response_mask"], dtype=torch.float32)
    for i in range(len(batch)):
        length = int(batch[i].batch["response_mask"].sum())
        text = tokenizer.decode(batch[i].batch["responses"][:length])
        rewards[i, length - 1] = gsm8k.compute_score(text, batch[i].non_tensor_batch["reward_model"]["ground_truth"])
    batch.batch["token_level_rewards"] = rewards

    scores = {}
    for uid, score in zip(batch.non_tensor_batch["uid"], rewards.sum(-1).tolist()):
        append_to_dict(scores, {uid: score})
    kept = batch.select_idxs([np.std(scores[uid]) > 0 for uid in batch.non_tensor_batch["uid"]])
    kept = compute_advantage(kept, adv_estimator="grpo")

    lengths = kept.batch["attention_mask"].sum(-1).tolist()
    partitions = get_seqlen_balanced_partitions(lengths, k_partitions=2, equal_size=True)
    balance = log_seqlen_unbalance(lengths, partitions, prefix="seqlen")
    kept.reorder(torch.tensor([row for part in partitions for row in part]))
    padded, pad_size = pad_dataproto_to_divisor(kept, 3)
    parts = padded.chunk(3)
    whole = unpad_dataproto(DataProto.concat(parts), pad_size)

    log_probs = torch.randn(whole.batch["responses"].shape, generator=torch.Generator().manual_seed(0))
    kl = masked_mean(kl_penalty(log_probs, log_probs * 0.9, "low_var_kl"), whole.batch["response_mask"])
    ids, mask = postprocess_data(whole.batch["responses"], whole.batch["response_mask"], 40, 0, left_pad=False)
    return {
        "rows": len(batch),
        "kept": len(kept),
        "pad_size": pad_size,
        "parts": [len(part) for part in parts],
        "advantage": whole.batch["advantages"].abs().max().item(),
        "kl": kl.item(),
        "balance": balance["seqlen/balanced_max"] - balance["seqlen/balanced_min"],
        "width": ids.shape[1] + mask.shape[1],
    }


if __name__ == "__main__":
    sys.stdout.write(f"{main(sys.argv[1], sys.argv[2])}\n")
