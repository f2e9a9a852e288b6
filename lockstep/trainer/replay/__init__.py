"""`lockstep replay`: steps of a run computed again and compared.

command line (main_replay.py) ─► what to replay: config, checkpoint, steps (source_run.py)
    ─► the steps computed again in a temporary folder (replay.py), the last one recorded (recorder.py, recording.py)
    ─► compared with the log, or two recordings with each other (compare.py) ─► printed (report.py)
"""
