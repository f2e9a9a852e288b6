"""verl.trainer.ppo"""
