"""A mixture of experts in place of a block's MLP: each token goes to the K of E MLPs that a router prefers for it.

Legend. B sequences, T positions, D width, F = 4 D, E experts, K experts of a token, C places that an expert has for a
sequence (its capacity): C = ceil(capacity * K * T / E), at most T.

The form is GShard's (Lepikhin et al. 2020, arXiv:2006.16668): products with 0/1 tensors [B, T, E, C] bring tokens to
experts and back. A token for which an expert has no place is dropped there: the residual sum continues without it.
GShard's "groups" are the sequences here. So the choice of experts, the dropped tokens and the balance loss depend on
one sequence alone: not on the batch, nor on how it is spread over workers and micro-batches. Places are taken in the
order of positions, so that position t still sees only 0..t.

The balance loss of a sequence is E * sum_e f_e P_e (Fedus et al. 2021, arXiv:2101.03961), at least 1, with f_e the part
of the T * K choices that fell on e, and P_e the mean over positions of the router's probability of e. Its gradient
flows through P. The loss of a global batch is the mean over its sequences, summed over blocks, times `balance`.

Everything is made of layers and operations that Keras ships; their names are an interface, like those of blocks.py:
    block_00_router            Dense [D, E], softmax, in float32 under every precision policy
    block_00_router_balance    adds the loss
    block_00_router_dropped    passes on the dropped part of each token, [B, T, 1]
    block_00_experts_up        EinsumDense [E, D, F], bias [E, 1, F];  block_00_experts_down  [E, F, D], [E, 1, D]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import keras
from keras import initializers

from tfdist.control.exit_codes import ConfigError
from tfdist.models.keras_untyped import layers, ops


@dataclass(frozen=True)
class Experts:
    """The options of the mixture of experts of each block."""

    count: int
    per_token: int = 2
    capacity: float = 1.25
    balance: float = 0.01

    def places(self, length: int) -> int:
        """Returns C, the number of places of each expert for a sequence of `length` tokens."""
        return min(length, math.ceil(self.capacity * self.per_token * length / self.count))


def choose_experts(
    model: str, *, experts: int, experts_per_token: int | None, capacity: float | None, balance: float | None
) -> Experts | None:
    """Returns the options of --model_args as Experts, or None without experts. Arguments that are None have the
    default.

    Raises ConfigError for an option out of range, or given without experts.
    """
    given = {"per_token": experts_per_token, "capacity": capacity, "balance": balance}
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(experts, int) or experts < 0 or experts == 1:
        raise ConfigError(
            f"--model={model} got experts={experts}: it must be 0 for none, or a whole number, at least 2."
        )
    if not experts:
        if given:
            name = "experts_per_token" if "per_token" in given else next(iter(given))
            raise ConfigError(f"--model={model} got {name} without experts: add for example experts=8, or drop it.")
        return None
    found = Experts(experts, **given)
    if not isinstance(found.per_token, int) or not 1 <= found.per_token <= experts:
        raise ConfigError(
            f"--model={model} got experts_per_token={found.per_token}: it must be a whole number from 1 to"
            f" experts={experts}."
        )
    if not found.capacity > 0:
        raise ConfigError(
            f"--model={model} got capacity={found.capacity}: it must be above 0, and at 1, every place is taken if all"
            " experts are equally loaded."
        )
    if not found.balance >= 0:
        raise ConfigError(f"--model={model} got balance={found.balance}: it must be at least 0.")
    return found


def mixture(
    x_BTD: keras.KerasTensor,
    name: str,
    experts: Experts,
    start: initializers.Initializer,
    last: initializers.Initializer,
) -> keras.KerasTensor:
    """Returns the experts' outputs [B, T, D], weighted by the router. start: initializer of the router and of the first
    projection; last: of the second projection.

    With K > 1 a token's weights are its probabilities divided by their sum over its K experts, before any is dropped.
    With K = 1 the weight is the probability itself; otherwise the router would learn only balance.
    """
    length, width = x_BTD.shape[1:]
    places = experts.places(length)
    router = layers.Dense(
        experts.count,
        use_bias=False,
        activation="softmax",
        kernel_initializer=start.clone(),
        dtype="float32",
        name=f"{name}_router",
    )
    likes_BTE = router(x_BTD)
    weights_BTK, chosen_BTK = ops.top_k(likes_BTE, experts.per_token)
    if experts.per_token > 1:
        weights_BTK = weights_BTK / ops.sum(weights_BTK, -1, keepdims=True)
    chosen_BTKE = ops.one_hot(chosen_BTK, experts.count, dtype="float32")
    taken_BTKC = _take_places(chosen_BTKE, places)

    dispatch_BTEC = ops.einsum("btke,btkc->btec", chosen_BTKE, taken_BTKC)
    combine_BTEC = ops.einsum("btke,btkc->btec", ops.expand_dims(weights_BTK, -1) * chosen_BTKE, taken_BTKC)
    x_BECD = ops.einsum("btec,btd->becd", ops.cast(dispatch_BTEC, x_BTD.dtype), x_BTD)
    x_BECF = layers.EinsumDense(
        "becd,edf->becf",
        (experts.count, places, 4 * width),
        bias_axes="ef",
        kernel_initializer=start.clone(),
        name=f"{name}_experts_up",
    )(x_BECD)
    x_BECF = ops.gelu(x_BECF, approximate=True)
    y_BECD = layers.EinsumDense(
        "becf,efd->becd",
        (experts.count, places, width),
        bias_axes="ed",
        kernel_initializer=last,
        name=f"{name}_experts_down",
    )(x_BECF)
    y_BTD = ops.einsum("btec,becd->btd", ops.cast(combine_BTEC, y_BECD.dtype), y_BECD)

    balance = layers.ActivityRegularization(l1=experts.balance, dtype="float32", name=f"{name}_router_balance")(
        _balance(likes_BTE, chosen_BTKE)
    )
    dropped_BT1 = ops.mean(1.0 - ops.sum(taken_BTKC, -1), -1, keepdims=True)
    dropped_BT1 = layers.Identity(dtype="float32", name=f"{name}_router_dropped")(dropped_BT1)
    # Keras runs only layers that lead to an output.
    return y_BTD + ops.cast(0.0 * (balance + dropped_BT1), y_BTD.dtype)


def _take_places(chosen_BTKE: keras.KerasTensor, places: int) -> keras.KerasTensor:
    """float32 [B, T, K, C]: 1 at the place that the token has with its K-th expert; all 0 if no place was left."""
    _, length, per_token, count = chosen_BTKE.shape
    wanted_BNE = ops.cast(
        ops.reshape(chosen_BTKE, (-1, length * per_token, count)), "int32"
    )  # N: all choices, by position
    before_BNE = ops.cumsum(wanted_BNE, axis=1) - wanted_BNE
    place_BTK = ops.reshape(ops.sum(before_BNE * wanted_BNE, -1), (-1, length, per_token))
    return ops.one_hot(place_BTK, places, dtype="float32")  # zeros for numbers of C or more


def _balance(likes_BTE: keras.KerasTensor, chosen_BTKE: keras.KerasTensor) -> keras.KerasTensor:
    """float32 [1, 1, 1]: the balance loss, as the mean over sequences."""
    _, _, per_token, count = chosen_BTKE.shape
    fraction_BE = ops.mean(ops.sum(chosen_BTKE, 2), 1) / per_token
    loss_B1 = count * ops.sum(fraction_BE * ops.mean(likes_BTE, 1), -1, keepdims=True)
    return ops.expand_dims(ops.mean(loss_B1, 0, keepdims=True), 0)
