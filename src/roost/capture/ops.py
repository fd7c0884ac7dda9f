"""The operations that nodes agree to run, one by one, and what Roost must know of each.

A namespace would not be enough: some ATen operations read and create files. Every name below is an overload whose
only effects are on the tensors it is given. Operations that return memory they have not written (`empty`) are not here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from roost.errors import GraphFormatError

_ELEMENTWISE = """
abs.default neg.default exp.default expm1.default log.default log1p.default log2.default sqrt.default rsqrt.default
square.default reciprocal.default sin.default cos.default tan.default tanh.default tanh_.default sigmoid.default
sigmoid_.default erf.default floor.default ceil.default round.default sign.default relu.default relu_.default
leaky_relu.default leaky_relu_.default elu.default elu_.default selu.default selu_.default celu.default celu_.default
gelu.default silu.default silu_.default mish.default mish_.default hardtanh.default hardtanh_.default hardswish.default
hardswish_.default hardsigmoid.default hardsigmoid_.default relu6.default relu6_.default softplus.default
log_sigmoid.default prelu.default rrelu.default rrelu_.default glu.default threshold.default softshrink.default hardshrink.default
clamp.default clamp.Tensor clamp_.default clamp_min.default clamp_max.default clamp_min_.default
clamp_max_.default isnan.default isinf.default
isfinite.default logical_not.default bitwise_not.default nan_to_num.default exp_.default sqrt_.default
add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor rsub.Tensor rsub.Scalar
mul.Tensor mul.Scalar mul_.Tensor mul_.Scalar div.Tensor div.Scalar div_.Tensor div_.Scalar div.Tensor_mode div.out
div.Scalar_mode floor_divide.default remainder.Tensor remainder.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
maximum.default minimum.default atan2.default eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor
le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar logical_and.default logical_or.default logical_xor.default
bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor where.self
where.ScalarSelf where.ScalarOther where.Scalar addcmul.default addcdiv.default lerp.Scalar lerp.Tensor
lerp_.Scalar lerp_.Tensor
absolute.default negative.default atan.default asin.default acos.default sinh.default cosh.default asinh.default acosh.default
atanh.default exp2.default log10.default trunc.default frac.default erfc.default erfinv.default logit.default lgamma.default
digamma.default sinc.default sgn.default clip.default clip.Tensor clamp_min.Tensor clamp_max.Tensor clamp_.Tensor
logaddexp.default logaddexp2.default xlogy.Tensor hypot.default copysign.Tensor fmod.Tensor fmod.Scalar fmax.default fmin.default
multiply.Tensor multiply.Scalar subtract.Tensor subtract.Scalar divide.Tensor divide.Scalar true_divide.Tensor greater.Tensor
greater.Scalar greater_equal.Tensor greater_equal.Scalar less.Tensor less.Scalar less_equal.Tensor less_equal.Scalar
not_equal.Tensor not_equal.Scalar round.decimals neg_.default abs_.default log_.default rsqrt_.default reciprocal_.default
pow_.Scalar pow_.Tensor floor_.default ceil_.default round_.default sub_.Scalar addcmul_.default addcdiv_.default
logical_not_.default logical_and_.default logical_or_.default bitwise_and_.Tensor bitwise_or_.Tensor nan_to_num_.default
bitwise_and.Scalar bitwise_or.Scalar masked_scatter.default
"""

_LAYERS = """
linear.default bilinear.default matmul.default bmm.default mm.default mv.default dot.default vdot.default
addmm.default baddbmm.default
einsum.default outer.default conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding
conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input convolution.default batch_norm.default
layer_norm.default group_norm.default instance_norm.default rms_norm.default linalg_vector_norm.default
_weight_norm.default
max_pool1d.default max_pool2d.default max_pool3d.default max_pool2d_with_indices.default avg_pool1d.default avg_pool2d.default
avg_pool3d.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
adaptive_max_pool1d.default adaptive_max_pool2d.default dropout.default dropout_.default feature_dropout.default
feature_dropout_.default alpha_dropout.default feature_alpha_dropout.default embedding.default
scaled_dot_product_attention.default softmax.int log_softmax.int _softmax.default _log_softmax.default logsumexp.default
lstm.input gru.input rnn_tanh.input rnn_relu.input upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec
upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec upsample_bicubic2d.vec
lstm_cell.default gru_cell.default rnn_tanh_cell.default rnn_relu_cell.default
adaptive_max_pool3d.default grid_sampler.default affine_grid_generator.default _upsample_nearest_exact1d.vec
_upsample_nearest_exact2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec
addmv.default addbmm.default addr.default ger.default inner.default tensordot.default linalg_vecdot.default linalg_cross.default
linalg_norm.default cdist.default
"""

_LOSSES = """
cross_entropy_loss.default nll_loss.default nll_loss_nd.default nll_loss2d.default mse_loss.default l1_loss.default
smooth_l1_loss.default huber_loss.default binary_cross_entropy.default binary_cross_entropy_with_logits.default
kl_div.default cosine_similarity.default cosine_embedding_loss.default hinge_embedding_loss.default
margin_ranking_loss.default triplet_margin_loss.default soft_margin_loss.default multi_margin_loss.default
poisson_nll_loss.default pairwise_distance.default
"""

_REDUCTIONS = """
sum.default sum.dim_IntList mean.default mean.dim var.correction var.default var.dim std.correction std.default std.dim
var_mean.correction norm.ScalarOpt_dim norm.Scalar amax.default amin.default max.default max.dim max.other min.default min.dim
min.other argmax.default argmin.default prod.default prod.dim_int cumsum.default cumprod.default any.default any.dim
all.default all.dim topk.default sort.default sort.stable argsort.default argsort.stable any.dims all.dims
nansum.default nanmean.default logcumsumexp.default cummax.default cummin.default median.default median.dim kthvalue.default
aminmax.default std_mean.correction var_mean.dim var_mean.default std_mean.default count_nonzero.default
count_nonzero.dim_IntList frobenius_norm.dim trace.default bucketize.Tensor searchsorted.Tensor
"""

_VIEWS = """
broadcast_tensors.default broadcast_to.default view.default reshape.default
flatten.using_ints unflatten.int squeeze.default squeeze.dim squeeze.dims unsqueeze.default
transpose.int permute.default t.default numpy_T.default mT.default mH.default matrix_H.default contiguous.default expand.default
expand_as.default
view_as.default reshape_as.default slice.Tensor select.int narrow.default diagonal.default split.Tensor split.sizes
split_with_sizes.default chunk.default unbind.int movedim.int movedim.intlist swapaxes.default swapdims.default
unfold.default alias.default detach.default detach_.default moveaxis.int moveaxis.intlist adjoint.default
tensor_split.sections tensor_split.indices ravel.default meshgrid.default meshgrid.indexing
cat.default concat.default stack.default repeat.default tile.default
repeat_interleave.self_int roll.default flip.default pad.default constant_pad_nd.default pixel_shuffle.default
pixel_unshuffle.default channel_shuffle.default im2col.default index.Tensor index_select.default gather.default
scatter.src scatter.value scatter_add.default index_add.default masked_fill.Scalar masked_fill.Tensor
masked_fill_.Scalar masked_fill_.Tensor copy_.default fill_.Scalar fill_.Tensor zero_.default one_hot.default
tril.default triu.default
tril_.default triu_.default scatter_.src scatter_.value scatter_add_.default scatter_reduce.two index_add_.default
index_copy.default index_fill.int_Scalar index_put.default index_put_.default take_along_dim.default
hstack.default vstack.default dstack.default column_stack.default diag.default diag_embed.default rot90.default
fliplr.default flipud.default slice_scatter.default select_scatter.default col2im.default
"""

_CREATION = """
arange.default arange.start arange.start_step linspace.default eye.default zeros.default ones.default full.default
zeros_like.default ones_like.default full_like.default new_zeros.default new_ones.default new_full.default
scalar_tensor.default lift_fresh_copy.default rand.default randn.default rand_like.default randn_like.default
bernoulli.default bernoulli.p bernoulli_.float normal_.default uniform_.default clone.default
bernoulli_.Tensor exponential_.default randint.default randint.low randint_like.default randint_like.low_dtype
randperm.default multinomial.default tril_indices.default triu_indices.default
to.dtype to.other type_as.default _to_copy.default sym_size.int
"""

_WITHOUT_GRADIENT = """
detach.default detach_.default eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar
ge.Tensor ge.Scalar logical_and.default logical_or.default logical_xor.default logical_not.default bitwise_not.default
bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor isnan.default
isinf.default isfinite.default argmax.default argmin.default argsort.default any.default any.dim all.default all.dim
one_hot.default zeros_like.default ones_like.default full_like.default new_zeros.default new_ones.default
new_full.default rand_like.default randn_like.default sym_size.int floor_divide.default
greater.Tensor greater.Scalar greater_equal.Tensor greater_equal.Scalar less.Tensor less.Scalar less_equal.Tensor
less_equal.Scalar not_equal.Tensor not_equal.Scalar bitwise_and.Scalar bitwise_or.Scalar argsort.stable any.dims all.dims
count_nonzero.default count_nonzero.dim_IntList bucketize.Tensor searchsorted.Tensor randint_like.default
randint_like.low_dtype multinomial.default
"""

SCALAR_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "scalar.add": operator.add,
    "scalar.sub": operator.sub,
    "scalar.mul": operator.mul,
    "scalar.floordiv": operator.floordiv,
    "scalar.mod": operator.mod,
    "scalar.truediv": operator.truediv,
}
"""Arithmetic on sizes that depend on the batch: two numbers in, one out. All keep integers except truediv."""

SIZE_OP = "aten.sym_size.int"
"""The only tensor operation whose result is a number."""

ALLOWED_OPS: frozenset[str] = frozenset(
    f"aten.{name}" for group in (_ELEMENTWISE, _LAYERS, _LOSSES, _REDUCTIONS, _VIEWS, _CREATION) for name in group.split()
) | frozenset(SCALAR_OPS)
"""Every operation a graph may contain."""

CREATES_TENSORS: frozenset[str] = frozenset(
    f"aten.{name}"
    for name in (
        "arange.default",
        "arange.start",
        "arange.start_step",
        "linspace.default",
        "eye.default",
        "zeros.default",
        "ones.default",
        "full.default",
        "scalar_tensor.default",
        "rand.default",
        "randn.default",
        "randint.default",
        "randint.low",
        "randperm.default",
        "tril_indices.default",
        "triu_indices.default",
    )
)
"""Operations without a tensor argument: the stage tells them its device."""

HIDDEN_WRITES: dict[str, tuple[int, ...]] = {
    "aten.batch_norm.default": (3, 4),
    "aten.instance_norm.default": (3, 4),
}
"""Positions of arguments that an operation changes although its schema does not say so."""

MAY_RETURN_INPUT: frozenset[str] = frozenset(
    f"aten.{name}"
    for name in (
        "dropout.default",
        "feature_dropout.default",
        "alpha_dropout.default",
        "feature_alpha_dropout.default",
        "pad.default",
        "type_as.default",
        "view_as.default",
        "expand_as.default",
        "tile.default",
        "einsum.default",
        "broadcast_tensors.default",
        "pixel_shuffle.default",
        "pixel_unshuffle.default",
        "channel_shuffle.default",
        "meshgrid.default",
        "meshgrid.indexing",
    )
)
"""Operations whose result can be their first argument, or a view of it, although their schema does not say so."""

EVALUATION_SETTINGS: dict[str, tuple[int, bool | float, int | None]] = {
    "aten.dropout.default": (2, False, None),
    "aten.dropout_.default": (2, False, None),
    "aten.feature_dropout.default": (2, False, None),
    "aten.feature_dropout_.default": (2, False, None),
    "aten.alpha_dropout.default": (2, False, None),
    "aten.feature_alpha_dropout.default": (2, False, None),
    "aten.rrelu.default": (3, False, None),
    "aten.rrelu_.default": (3, False, None),
    "aten.batch_norm.default": (5, False, 3),
    "aten.instance_norm.default": (5, False, 3),
    "aten.scaled_dot_product_attention.default": (4, 0.0, None),
    "aten.lstm.input": (6, False, None),
    "aten.gru.input": (6, False, None),
    "aten.rnn_tanh.input": (6, False, None),
    "aten.rnn_relu.input": (6, False, None),
}
"""How evaluation differs from training: (position of the argument, its value in evaluation, position of an argument that
must not be None for the change). The last keeps norms without running statistics as they are: they use the batch's own."""

RANDOM_OPS: frozenset[str] = frozenset(
    f"aten.{name}"
    for name in (
        "rand.default",
        "randn.default",
        "rand_like.default",
        "randn_like.default",
        "bernoulli.default",
        "bernoulli.p",
        "bernoulli_.float",
        "bernoulli_.Tensor",
        "normal_.default",
        "uniform_.default",
        "exponential_.default",
        "randint.default",
        "randint.low",
        "randint_like.default",
        "randint_like.low_dtype",
        "randperm.default",
        "multinomial.default",
    )
)
"""Operations that always draw random numbers."""

RANDOM_IN_TRAINING: dict[str, tuple[int, int | None]] = {
    "aten.dropout.default": (1, 2),
    "aten.dropout_.default": (1, 2),
    "aten.feature_dropout.default": (1, 2),
    "aten.feature_dropout_.default": (1, 2),
    "aten.alpha_dropout.default": (1, 2),
    "aten.feature_alpha_dropout.default": (1, 2),
    "aten.rrelu.default": (2, 3),
    "aten.rrelu_.default": (2, 3),
    "aten.scaled_dot_product_attention.default": (4, None),
    "aten.lstm.input": (5, 6),
    "aten.gru.input": (5, 6),
    "aten.rnn_tanh.input": (5, 6),
    "aten.rnn_relu.input": (5, 6),
}
"""Operations that draw random numbers if (this argument is not zero, and this one, where there is one, is true)."""

NO_GRADIENT: frozenset[str] = frozenset(f"aten.{name}" for name in _WITHOUT_GRADIENT.split())
"""Operations whose results carry no gradient."""

INTEGER_OUTPUTS: dict[str, tuple[int, ...]] = {
    "aten.max.dim": (1,),
    "aten.min.dim": (1,),
    "aten.topk.default": (1,),
    "aten.sort.default": (1,),
    "aten.sort.stable": (1,),
    "aten.cummax.default": (1,),
    "aten.cummin.default": (1,),
    "aten.median.dim": (1,),
    "aten.kthvalue.default": (1,),
    "aten.max_pool2d_with_indices.default": (1,),
    "aten.adaptive_max_pool1d.default": (1,),
    "aten.adaptive_max_pool2d.default": (1,),
    "aten.adaptive_max_pool3d.default": (1,),
}
"""Positions of results that are indices."""

ITEM_BY_ITEM: frozenset[str] = frozenset({"aten.broadcast_tensors.default"})
"""Operations on a list of tensors whose n-th result depends on the n-th tensor only."""

FREE_OPS: frozenset[str] = frozenset(f"aten.{name}" for name in _VIEWS.split()[: _VIEWS.split().index("cat.default")]) | frozenset(
    {*SCALAR_OPS, SIZE_OP}
)
"""Operations that compute nothing: views and sizes."""


@cache
def resolve(op: str) -> Callable[..., Any]:
    """Return the callable for an operation's name. Raises GraphFormatError unless it is on the list of allowed operations."""
    if op not in ALLOWED_OPS:
        raise GraphFormatError(f"operation {op[:80]!r} is not on the list of operations that nodes run")
    if op in SCALAR_OPS:
        return SCALAR_OPS[op]
    _, packet, overload = op.split(".")
    function = getattr(getattr(torch.ops.aten, packet), overload)
    assert isinstance(function, torch._ops.OpOverload)
    return function
