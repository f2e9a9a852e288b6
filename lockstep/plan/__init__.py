"""What a run will need before it starts: batch units, memory by phase, and time per step. No torch, no model is loaded."""
