"""Calls that make sense of operations whose arguments hardly ever fit together by chance; the fuzzer changes some arguments."""

from __future__ import annotations

from typing import Any

VECTOR, SQUARE, IMAGE, SEQUENCE = "float32[4]", "float32[4,4]", "float32[2,4,8,8]", "float32[2,5,4]"
SIGNAL, VOLUME, INDICES = "float32[2,4,8]", "float32[1,4,4,4,4]", "int64[4,4]"
_GATES = {"lstm": ("float32[16,4]", "float32[16]"), "gru": ("float32[12,4]", "float32[12]"), "rnn_tanh": (SQUARE, VECTOR)}
_GATES["rnn_relu"] = _GATES["rnn_tanh"]
_STATE = "float32[1,2,4]"
_CONVOLUTIONS = {"1": (SIGNAL, "float32[4,4,3]"), "2": (IMAGE, "float32[4,4,3,3]"), "3": (VOLUME, "float32[4,4,3,3,3]")}

TEMPLATES: dict[str, list[Any]] = {
    "aten.addmv.default": [VECTOR, SQUARE, VECTOR],
    "aten.baddbmm.default": ["float32[4,4,4]"] * 3,
    "aten.addbmm.default": [SQUARE, "float32[4,4,4]", "float32[4,4,4]"],
    "aten.bmm.default": ["float32[4,4,4]"] * 2,
    "aten.bilinear.default": [SQUARE, SQUARE, "float32[4,4,4]", VECTOR],
    "aten.batch_norm.default": [IMAGE, VECTOR, VECTOR, VECTOR, VECTOR, True, 0.1, 1e-5, True],
    "aten.instance_norm.default": [IMAGE, VECTOR, VECTOR, VECTOR, VECTOR, True, 0.1, 1e-5, True],
    "aten.group_norm.default": [IMAGE, 2, VECTOR, VECTOR, 1e-5, True],
    "aten.layer_norm.default": [SEQUENCE, [4], VECTOR, VECTOR, 1e-5, True],
    "aten.rms_norm.default": [SEQUENCE, [4], VECTOR, 1e-5],
    "aten._weight_norm.default": [SQUARE, "float32[4,1]", 0],
    "aten.scaled_dot_product_attention.default": ["float32[2,2,5,4]"] * 3 + [None, 0.0, False],
    "aten.embedding.default": [SQUARE, INDICES, 0, False, False],
    "aten.multi_margin_loss.default": [SQUARE, "int64[4]", 1, 1, VECTOR, 1],
    "aten.nll_loss.default": [SQUARE, "int64[4]", VECTOR, 1, -100],
    "aten.nll_loss_nd.default": [IMAGE, "int64[2,8,8]", VECTOR, 1, -100],
    "aten.nll_loss2d.default": [IMAGE, "int64[2,8,8]", VECTOR, 1, -100],
    "aten.cross_entropy_loss.default": [IMAGE, "int64[2,8,8]", VECTOR, 1, -100, 0.1],
    "aten.gather.default": [SQUARE, 0, INDICES],
    "aten.scatter.src": [SQUARE, 0, INDICES, SQUARE],
    "aten.scatter.value": [SQUARE, 0, INDICES, 1],
    "aten.scatter_.src": [SQUARE, 0, INDICES, SQUARE],
    "aten.scatter_.value": [SQUARE, 0, INDICES, 1],
    "aten.scatter_add.default": [SQUARE, 0, INDICES, SQUARE],
    "aten.scatter_add_.default": [SQUARE, 0, INDICES, SQUARE],
    "aten.scatter_reduce.two": [SQUARE, 0, INDICES, SQUARE, "sum"],
    "aten.index_add.default": [SQUARE, 0, "int64[4]", SQUARE],
    "aten.index_add_.default": [SQUARE, 0, "int64[4]", SQUARE],
    "aten.index_copy.default": [SQUARE, 0, "int64[4]", SQUARE],
    "aten.index_fill.int_Scalar": [SQUARE, 0, "int64[4]", 1],
    "aten.index_select.default": [SQUARE, 0, "int64[4]"],
    "aten.index_put.default": [SQUARE, ["int64[4]"], SQUARE, True],
    "aten.index_put_.default": [SQUARE, ["int64[4]"], SQUARE, False],
    "aten.index.Tensor": [SQUARE, ["int64[4]", "int64[4]"]],
    "aten.take_along_dim.default": [SQUARE, INDICES, 0],
    "aten.masked_fill.Tensor": [SQUARE, "bool[4,4]", "float32[]"],
    "aten.masked_fill_.Tensor": [SQUARE, "bool[4,4]", "float32[]"],
    "aten.masked_scatter.default": [SQUARE, "bool[4,4]", SQUARE],
    "aten.im2col.default": [IMAGE, [3, 3], [1, 1], [1, 1], [2, 2]],
    "aten.col2im.default": ["float32[2,4,8]", [4, 3], [2, 2], [1, 1], [0, 0], [1, 1]],
    "aten.linalg_cross.default": ["float32[4,4,3]", "float32[4,4,3]"],
    "aten.grid_sampler.default": [IMAGE, "float32[2,8,8,2]", 0, 0, False],
    "aten.affine_grid_generator.default": ["float32[2,2,3]", [2, 4, 8, 8], False],
    "aten.split.sizes": [SQUARE, [1, 3], 0],
    "aten.split_with_sizes.default": [SQUARE, [1, 3], 0],
    "aten.select_scatter.default": [SQUARE, VECTOR, 0, 1],
    "aten.slice_scatter.default": [SQUARE, SQUARE, 0, 0, 4, 1],
    "aten.repeat_interleave.self_int": [SQUARE, 2, 0],
    "aten.one_hot.default": ["int64[2]", 4],
    "aten.pixel_shuffle.default": [IMAGE, 2],
    "aten.pixel_unshuffle.default": [IMAGE, 2],
    "aten.channel_shuffle.default": [IMAGE, 2],
    "aten.unfold.default": [SQUARE, 0, 2, 1],
    "aten.pad.default": [IMAGE, [1, 1, 2, 0], "reflect"],
    "aten.cdist.default": [SQUARE, SQUARE, 2.0, None],
    "aten.bucketize.Tensor": [SQUARE, VECTOR],
    "aten.searchsorted.Tensor": [VECTOR, SQUARE],
    "aten.multinomial.default": [SQUARE, 2, True],
    "aten.triplet_margin_loss.default": [SQUARE, SQUARE, SQUARE],
    "aten.prelu.default": [IMAGE, VECTOR],
    "aten.convolution.default": [IMAGE, "float32[4,4,3,3]", VECTOR, [1, 1], [1, 1], [1, 1], False, [0, 0], 1],
    "aten.conv_transpose1d.default": [SIGNAL, "float32[4,4,3]", VECTOR, [2], [1], [1], 1, [1]],
    "aten.conv_transpose2d.input": [IMAGE, "float32[4,4,3,3]", VECTOR, [2, 2], [1, 1], [1, 1], 1, [1, 1]],
    "aten.conv_transpose3d.input": [VOLUME, "float32[4,4,3,3,3]", VECTOR, [2] * 3, [1] * 3, [1] * 3, 1, [1] * 3],
    "aten.div.Tensor_mode": ["int64[4,4]", "int64[4]"],
    "aten.fmod.Tensor": ["int64[4,4]", "int64[4]"],
    "aten.remainder.Tensor": ["int32[4,4]", "int32[4]"],
    "aten.floor_divide.default": ["int64[4,4]", "int64[4]"],
    "aten.einsum.default": ["ij,jk->ik", [SQUARE, SQUARE]],
}
"""Tensors are named 'dtype[sizes]'."""

for _name, (_weight, _bias) in _GATES.items():
    _states: Any = [_STATE, _STATE] if _name == "lstm" else _STATE
    TEMPLATES[f"aten.{_name}.input"] = [SEQUENCE, _states, [_weight, _weight, _bias, _bias], True, 1, 0.1, True, False, True]
    _cell = "float32[2,4]"
    _hidden: Any = [_cell, _cell] if _name == "lstm" else _cell
    TEMPLATES[f"aten.{_name}_cell.default"] = [_cell, _hidden, _weight, _weight, _bias, _bias]
for _digit, (_input, _weight) in _CONVOLUTIONS.items():
    _ones = [1] * int(_digit)
    TEMPLATES[f"aten.conv{_digit}d.default"] = [_input, _weight, VECTOR, _ones, _ones, _ones, 1]
    TEMPLATES[f"aten.conv{_digit}d.padding"] = [_input, _weight, VECTOR, _ones, "same", _ones, 1]
    TEMPLATES[f"aten.max_pool{_digit}d.default"] = [_input, [2] * int(_digit), [2] * int(_digit), [0] * int(_digit), _ones, True]
    TEMPLATES[f"aten.avg_pool{_digit}d.default"] = [_input, [2] * int(_digit), [2] * int(_digit), [0] * int(_digit), True, False]
    for _kind in ("avg", "max"):
        TEMPLATES[f"aten.adaptive_{_kind}_pool{_digit}d.default"] = [_input, [3] * int(_digit)]
    for _kind, _dimension in (("nearest", "1"), ("nearest", "2"), ("nearest", "3"), ("_nearest_exact", "1"), ("_nearest_exact", "2")):
        if _dimension == _digit:
            _op = f"aten.{'_' if _kind[0] == '_' else ''}upsample_{_kind.lstrip('_')}{_dimension}d.vec"
            TEMPLATES[_op] = [_input, None, [1.5] * int(_digit)]
for _op, _input in {
    "upsample_linear1d": SIGNAL,
    "upsample_bilinear2d": IMAGE,
    "upsample_bicubic2d": IMAGE,
    "upsample_trilinear3d": VOLUME,
    "_upsample_bilinear2d_aa": IMAGE,
    "_upsample_bicubic2d_aa": IMAGE,
}.items():
    TEMPLATES[f"aten.{_op}.vec"] = [_input, None, False, [1.5] * (2 if "2d" in _op else 1 if "1d" in _op else 3)]
TEMPLATES["aten.max_pool2d_with_indices.default"] = TEMPLATES["aten.max_pool2d.default"]
