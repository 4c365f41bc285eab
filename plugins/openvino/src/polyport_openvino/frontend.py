"""What OpenVINO's PyTorch frontend translates by itself.

The frontend has no call that tells, so its table is copied here: the operators of its translations of FX graphs, without those
that write in place. `tests/openvino/test_frontend.py` holds it against the frontend itself.
Source: `src/frontends/pytorch/src/op_table.cpp` of https://github.com/openvinotoolkit/openvino, as built into 2026.4.
"""

from __future__ import annotations

OPERATORS = frozenset(
    """
    aten.__lshift__.Tensor aten.__rshift__.Tensor aten._adaptive_avg_pool1d.default aten._adaptive_avg_pool2d.default
    aten._adaptive_avg_pool3d.default aten._cdist_forward.default aten._convolution.default aten._embedding_bag.default
    aten._embedding_bag_forward_only.default aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default
    aten._grouped_mm.default aten._local_scalar_dense.default aten._log_softmax.default
    aten._native_batch_norm_legit.default aten._native_batch_norm_legit.no_stats
    aten._native_batch_norm_legit_functional.default aten._native_batch_norm_legit_no_training.default
    aten._safe_softmax.default aten._scaled_dot_product_flash_attention.default
    aten._scaled_dot_product_flash_attention_for_cpu.default aten._softmax.default aten._to_copy.default
    aten._transformer_encoder_layer_fwd.default aten._unsafe_index.Tensor aten._unsafe_view.default aten.abs.default
    aten.absolute.default aten.acos.default aten.acosh.default aten.adaptive_max_pool1d.default
    aten.adaptive_max_pool2d.default aten.adaptive_max_pool3d.default aten.add.Scalar aten.add.Tensor
    aten.addcmul.default aten.addmm.default aten.alias.default aten.alias_copy.default aten.all.default
    aten.amax.default aten.amin.default aten.angle.default aten.any.default aten.any.dim aten.any.dims
    aten.arange.default aten.arange.start aten.arange.start_step aten.argmax.default aten.argmin.default
    aten.argsort.default aten.argsort.stable aten.as_strided.default aten.as_strided_copy.default aten.asin.default
    aten.asinh.default aten.atan.default aten.atan2.default aten.atanh.default aten.avg_pool2d.default
    aten.avg_pool3d.default aten.baddbmm.default aten.bitwise_and.Scalar aten.bitwise_and.Tensor
    aten.bitwise_left_shift.Tensor aten.bitwise_not.default aten.bitwise_or.Tensor
    aten.bitwise_right_shift.Tensor_Scalar aten.bitwise_xor.Tensor aten.bmm.default aten.bucketize.Tensor
    aten.cat.default aten.ceil.default aten.celu.default aten.channel_shuffle.default aten.clamp.Tensor
    aten.clamp.default aten.clamp_max.Tensor aten.clamp_max.default aten.clamp_min.Tensor aten.clamp_min.default
    aten.clone.default aten.col2im.default aten.constant_pad_nd.default aten.convolution.default aten.copy.default
    aten.cos.default aten.cosh.default aten.cumsum.default aten.detach.default aten.div.Scalar aten.div.Tensor
    aten.div.Tensor_mode aten.dot.default aten.elu.default aten.embedding.default aten.empty.memory_format
    aten.eq.Scalar aten.eq.Tensor aten.erf.default aten.erfc.default aten.erfinv.default aten.exp.default
    aten.expand.default aten.expand_copy.default aten.expm1.default aten.eye.m
    aten.fake_quantize_per_channel_affine_cachemask.default aten.fake_quantize_per_tensor_affine_cachemask.default
    aten.fill.Scalar aten.fill.Tensor aten.flip.default aten.floor.default aten.floor_divide.default aten.fmod.Scalar
    aten.fmod.Tensor aten.full.default aten.full.names aten.full_like.default aten.gather.default aten.gcd.default
    aten.ge.Scalar aten.ge.Tensor aten.gelu.default aten.glu.default aten.grid_sampler_2d.default aten.gt.Scalar
    aten.gt.Tensor aten.hardsigmoid.default aten.hardswish.default aten.hardtanh.default aten.hstack.default
    aten.index.Tensor aten.index_add.default aten.index_copy.default aten.index_fill.int_Scalar aten.index_put.default
    aten.index_select.default aten.instance_norm.default aten.isfinite.default aten.isinf.default aten.isnan.default
    aten.kthvalue.default aten.le.Scalar aten.le.Tensor aten.leaky_relu.default aten.lift_fresh_copy.default
    aten.linalg_cross.default aten.linalg_vector_norm.default aten.linear.default aten.linspace.default aten.log.default
    aten.log10.default aten.log1p.default aten.log2.default aten.log_sigmoid_forward.default aten.logaddexp.default
    aten.logical_and.default aten.logical_not.default aten.logical_or.default aten.logical_xor.default
    aten.logsumexp.default aten.lt.Scalar aten.lt.Tensor aten.masked_fill.Scalar aten.masked_fill.Tensor
    aten.masked_scatter.default aten.max.default aten.max.dim aten.max_pool2d_with_indices.default
    aten.max_pool3d_with_indices.default aten.maximum.default aten.mean.default aten.mean.dim aten.min.default
    aten.min.dim aten.minimum.default aten.mish.default aten.mm.default aten.mul.Scalar aten.mul.Tensor
    aten.native_batch_norm.default aten.native_dropout.default aten.native_group_norm.default
    aten.native_layer_norm.default aten.ne.Scalar aten.ne.Tensor aten.neg.default aten.new_full.default
    aten.new_ones.default aten.new_zeros.default aten.nonzero.default aten.one_hot.default aten.ones.default
    aten.ones.names aten.ones_like.default aten.outer.default aten.permute.default aten.permute_copy.default
    aten.pixel_shuffle.default aten.pixel_unshuffle.default aten.pow.Scalar aten.pow.Tensor_Scalar
    aten.pow.Tensor_Tensor aten.prod.default aten.prod.dim_int aten.rad2deg.default aten.rand.default
    aten.reciprocal.default aten.reflection_pad1d.default aten.reflection_pad2d.default aten.reflection_pad3d.default
    aten.relu.default aten.remainder.Scalar aten.remainder.Tensor aten.remainder.default aten.repeat.default
    aten.repeat_interleave.self_Tensor aten.repeat_interleave.self_int aten.rms_norm.default aten.roll.default
    aten.rot90.default aten.round.default aten.round.out aten.rrelu.default aten.rsqrt.default aten.rsub.Scalar
    aten.rsub.Tensor aten.scalar_tensor.default aten.scaled_dot_product_attention.default aten.scatter.src
    aten.scatter.value aten.scatter_add.default aten.searchsorted.Tensor aten.select.int aten.select_copy.int
    aten.select_scatter.default aten.sigmoid.default aten.sign.default aten.silu.default aten.sin.default
    aten.sinh.default aten.slice.Tensor aten.slice_copy.Tensor aten.slice_scatter.default aten.sort.default
    aten.sort.stable aten.split.Tensor aten.split_with_sizes.default aten.split_with_sizes_copy.default
    aten.sqrt.default aten.squeeze.dim aten.squeeze.dims aten.squeeze_copy.dims aten.stack.default aten.std.correction
    aten.sub.Tensor aten.sub.default aten.sum.default aten.sum.dim_IntList aten.sym_size.int aten.t.default
    aten.take_along_dim.default aten.tan.default aten.tanh.default aten.topk.default aten.transpose.int
    aten.tril.default aten.triu.default aten.unbind.int aten.unfold.default aten.unsqueeze.default
    aten.unsqueeze_copy.default aten.upsample_bicubic2d.default aten.upsample_bicubic2d.vec
    aten.upsample_bilinear2d.default aten.upsample_bilinear2d.vec aten.upsample_linear1d.vec
    aten.upsample_nearest1d.default aten.upsample_nearest1d.vec aten.upsample_nearest2d.default
    aten.upsample_nearest2d.vec aten.upsample_nearest3d.default aten.upsample_nearest3d.vec
    aten.upsample_trilinear3d.vec aten.var.correction aten.var_mean.correction aten.view.default
    aten.view_as_complex.default aten.view_as_real.default aten.view_copy.default aten.vstack.default aten.where.default
    aten.where.self aten.zero.default aten.zeros.default aten.zeros.names aten.zeros_like.default
    quantized_decomposed.dequantize_per_channel.default quantized_decomposed.dequantize_per_tensor.default
    quantized_decomposed.quantize_per_channel.default quantized_decomposed.quantize_per_tensor.default
""".split()
)
