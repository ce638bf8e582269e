"""Errors that name the case and say what to do."""

from __future__ import annotations

import sys
from types import TracebackType

from monai.utils import OptionalImportError

__all__ = ["AdviceError", "CaseError", "OutputError", "as_case_error", "root_cause", "show_cause_only"]


class AdviceError(ValueError):
    """An error with advice on what to do: reports show its words instead of its cause's.

    Example::

        >>> try:
        ...     raise AdviceError("the disk is full: remove what you do not need") from OSError(28, "No space left")
        ... except AdviceError as error:
        ...     print(root_cause(error))
        the disk is full: remove what you do not need
    """


class CaseError(ValueError):
    """An error that concerns one case.

    Args:
        case: the case's name.
        problem: what is wrong, what was expected, and what to do; made one line.

    Example::

        >>> print(CaseError("patient_7", "the scan is empty: load it again"))
        case patient_7: the scan is empty: load it again
    """

    def __init__(self, case: str, problem: str) -> None:
        problem = " ".join(problem.split())
        super().__init__(f"case {case}: {problem}")
        self.case = case
        self.problem = problem

    def __reduce__(self) -> tuple[type[CaseError], tuple[str, str]]:
        # Worker processes send exceptions by pickle, which would call the class with the message alone.
        return type(self), (self.case, self.problem)


class OutputError(OSError):
    """A file that cannot be written: no fault of a case, and every further case would meet it too.

    Example::

        >>> raise OutputError("maps/a.nii.gz cannot be written: the disk is full")
        Traceback (most recent call last):
            ...
        monai_saliency.errors.OutputError: maps/a.nii.gz cannot be written: the disk is full
    """


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain of ``raise ... from``, or the one nearest to the top that carries advice.

    Example::

        >>> try:
        ...     try:
        ...         {}["image"]
        ...     except KeyError as error:
        ...         raise RuntimeError("a transform failed") from error
        ... except RuntimeError as error:
        ...     print(repr(root_cause(error)))
        KeyError('image')
    """
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

    Example::

        >>> print(as_case_error(ValueError("expected 1 channel, got 3"), "patient_7"))
        case patient_7: ValueError: expected 1 channel, got 3
    """
    cause = root_cause(error)
    if isinstance(cause, CaseError):
        return CaseError(case, cause.problem)
    if isinstance(cause, AdviceError):
        return CaseError(case, str(cause))
    return CaseError(case, f"{before}{type(cause).__name__}: {cause}{after}")


def show_cause_only(debug: bool = False) -> None:
    """Let an uncaught exception print its cause in one line, without a traceback. For use by a program, as the bundle's
    ``initialize`` does: MONAI's transforms and configs wrap what went wrong in errors of their own.

    Args:
        debug: print the traceback before that line, as ``--debug`` does.

    Example::

        >>> import sys
        >>> before = sys.excepthook
        >>> show_cause_only()
        >>> changed, sys.excepthook = sys.excepthook is not before, before
        >>> changed
        True
    """
    previous = getattr(sys.excepthook, "previous", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and error.args:
            print(f"\n{error}", file=sys.stderr)
            return
        if debug or not isinstance(error, Exception):
            previous(kind, error, trace)
        cause = root_cause(error)
        is_ours = isinstance(cause, (ValueError, OutputError, OptionalImportError))
        if not (debug or is_ours):
            print("\nthe traceback is shown by --debug (--saliency_debug in another bundle)", file=sys.stderr)
        if isinstance(error, Exception):
            print(f"\nerror: {'' if is_ours else f'{type(cause).__name__}: '}{cause}", file=sys.stderr)

    hook.previous = previous  # type: ignore[attr-defined]
    sys.excepthook = hook
