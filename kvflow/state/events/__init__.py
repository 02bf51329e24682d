"""Events: what the shell reports to a core, named in the past tense."""

from kvflow.state.events import decode, prefill, shared
from kvflow.state.events.decode import *  # noqa: F403 - what each lists
from kvflow.state.events.prefill import *  # noqa: F403 - what each lists
from kvflow.state.events.shared import *  # noqa: F403 - what each lists

__all__: list[str] = []
__all__ += decode.__all__
__all__ += prefill.__all__
__all__ += shared.__all__
