"""Built-in scorers: functions of a solution text and its ground truth; `lockstep.rewards.default` selects one."""
