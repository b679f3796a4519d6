"""The errors a user can cause. Each carries one sentence with the remedy, and the exit code the command ends with."""


class UserError(Exception):
    """The command cannot be carried out as given (exit code 2)."""

    exit_code = 2


class DataError(UserError):
    """The images, the weights or the run directory are not what they must be (exit code 3)."""

    exit_code = 3


class InUse(DataError):
    """Another process works on this folder."""

    def __init__(self, sentence: str, holder: str = "unknown") -> None:
        super().__init__(sentence)
        self.holder = holder


class Diverged(UserError):
    """Training produced non-finite numbers several times in a row (exit code 4)."""

    exit_code = 4


class RankLost(UserError):
    """Of several processes that work on one run, one is gone or disagrees with the others (exit code 5)."""

    exit_code = 5


class Interrupted(UserError):
    """Stopped by a signal after saving; `odcluster resume` goes on from here (exit code 75)."""

    exit_code = 75


class ImageRefused(Exception):
    """One image cannot be used; the message is the reason. It is never fatal for a run by itself."""
