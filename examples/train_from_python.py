"""Train from a script or a notebook: `python examples/train_from_python.py MODEL`, a folder or a name on the Hub."""

import random
import sys

import lockstep


def reward(solution_str: str, ground_truth: str) -> float:
    """1 if the answer ends with the sum, with a small bonus for being short."""
    return float(solution_str.strip().rstrip(".").endswith(ground_truth)) - 0.001 * len(solution_str)


def main() -> None:
    pairs = [(random.randint(10, 99), random.randint(10, 99)) for _ in range(512)]
    rows = [{"prompt": f"What is {a} + {b}? Answer with the number.", "answer": str(a + b)} for a, b in pairs]
    result = lockstep.train(
        model=sys.argv[1], data=rows, reward=reward, algorithm="grpo", steps=20, batch_size=16, n=8, lr=1e-6,
        max_prompt_length=64, max_response_length=64, callbacks=lambda step, metrics: metrics["critic/score/mean"] > 0.95,
    )  # fmt: skip
    print(result.history.to_pandas()[["critic/score/mean", "response_length/mean"]])
    print(result.policy.generate("What is 17 + 25? Answer with the number.", temperature=0, max_tokens=32))
    print(f"run folder: {result.run_dir}")


if __name__ == "__main__":
    main()
