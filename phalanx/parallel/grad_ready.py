"""Being told that a parameter's gradient has come. Used by `parallel/replicate` and `parallel/zero`."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor


def on_arrival(parameter: Tensor, arrived: Callable[[int], None], number: int) -> None:
    """Call the method `arrived` with this number whenever the parameter's gradient has come.

    It does not keep the method's object alive. The collector does not see into a tensor's hooks, so an object that holds the
    parameter and is held by its hook would never go, nor would the weights and the connections that it has.
    """
    method = weakref.WeakMethod(arrived)

    def hook(_: Tensor) -> None:
        if (found := method()) is not None:
            found(number)

    parameter.register_post_accumulate_grad_hook(hook)
