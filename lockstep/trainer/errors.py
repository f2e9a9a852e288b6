"""How a training run fails: one exception, whose text is one line for the user."""


class RunError(RuntimeError):
    """A run that could not start, or ended early.

    exit_code: of the command: 2 for wrong config or input, otherwise 1.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])
