"""Errors that name the case and say what to do."""

from __future__ import annotations

from monai.utils import OptionalImportError

__all__ = [
    "AdviceError",
    "CaseError",
    "NothingToExplain",
    "OutputError",
    "SettingError",
    "as_case_error",
    "root_cause",
]


class AdviceError(ValueError):
    """An error with advice on what to do: reports show its words instead of its cause's."""


class SettingError(AdviceError):
    """A setting that fits no case, as a class that the network does not have: every further case would fail too."""


class CaseError(ValueError):
    """An error that concerns one case.

    Args:
        case: the case's name.
        problem: what is wrong, what was expected, and what to do; made one line.
    """

    def __init__(self, case: str, problem: str) -> None:
        problem = " ".join(problem.split())
        super().__init__(f"case {case}: {problem}")
        self.case = case
        self.problem = problem

    def __reduce__(self) -> tuple[type[CaseError], tuple[str, str]]:
        # Worker processes send exceptions by pickle, which would call the class with the message alone.
        return type(self), (self.case, self.problem)


class NothingToExplain(CaseError):
    """A case in which there is nothing to explain, such as a scan without a predicted channel: listed, and no
    failure.
    """


class OutputError(OSError):
    """A file that cannot be written: no fault of a case, and every further case would meet it too."""


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain of ``raise ... from``, or the one nearest to the top that carries advice."""
    advice = AdviceError, CaseError, OutputError, OptionalImportError
    while not isinstance(error, advice) and error.__cause__ is not None:
        error = error.__cause__
    return error


def as_case_error(error: BaseException, case: str, before: str = "", after: str = "") -> CaseError:
    """Any error as a :class:`CaseError`: its cause in one line, or its problem if it is a case's already.

    Args:
        error: what went wrong.
        case: the case it went wrong with. Code below may know it by another name, such as its file's.
        before: words to put before a cause that is not a case's.
        after: words to put after it.
    """
    cause = root_cause(error)
    if isinstance(cause, CaseError):
        return CaseError(case, cause.problem)
    if isinstance(cause, AdviceError):
        return CaseError(case, str(cause))
    return CaseError(case, f"{before}{type(cause).__name__}: {cause}{after}")
