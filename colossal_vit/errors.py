"""The two ways a run ends early on purpose. Every other exception is a bug and keeps its traceback."""


class UserError(Exception):
    """Something only the user can put right; the message names the key, the value and what would be right.

    Ends every rank with that one line on stderr and exit code 2.
    """

    exit_code = 2


class TrainingError(Exception):
    """Training cannot go on although nothing was set wrongly, for example a loss that is not finite.

    Ends every rank with that one line on stderr and exit code 1.
    """

    exit_code = 1
