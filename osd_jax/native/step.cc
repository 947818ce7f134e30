// The operations of a decoding step on a CPU: products of a few columns and large
// kernels, and attention of a few queries to a cache.
//
//   ProductFloat32  y[c, o] = sum_i x[c, i] kernel[o, i]
//   ProductBFloat16 the same with a bfloat16 kernel, widened to float32 in registers
//   ProductInt8     the same with an 8-bit kernel and one scale per kernel row;
//                   x is rounded to 8 bits too, with one scale per row
//   Widen           a part of a bfloat16 kernel in float32
//   Gather          some rows of a bfloat16 table in float32
//   Attention       softmax(query keys^T + bias) values, for each head
//
// A step spends most of its time reading kernels, so each kernel is read once: a few rows
// are multiplied by all columns while the next rows are prefetched. The order of a sum
// depends only on its length, so a column has the same bits whether it is computed alone
// or with others, in one call or several, with one thread or several.

#include "attention.h"
#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(ProductFloat32, osd::FloatProduct<ffi::F32>,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProductBFloat16, osd::FloatProduct<ffi::BF16>,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProductInt8, osd::Int8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Widen, osd::WidenPart,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("first"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(Gather, osd::Gather,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Attention, osd::Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
