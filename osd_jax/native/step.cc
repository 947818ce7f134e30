// What a decoding step computes on a CPU: few columns times large kernels, few queries
// attending to a cache.
//
//   ProductFloat32  y[c, o] = sum_i x[c, i] kernel[o, i]
//   ProductInt8     the same with a kernel of 8 bits and a scale for each of its rows;
//                   x is rounded to 8 bits too, with one scale for each of its rows
//   Attention       softmax(query keys^T + bias) values, for each head
//
// Reading the kernel is what a step waits for, so it is read once: some rows of it times
// all columns, while the rows that follow are fetched. How a sum is ordered depends on
// its length alone: a column's result has the same bits whatever is computed beside it,
// in one call or several, with one thread or several.

#include "attention.h"
#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(ProductFloat32, osd::Float32,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProductInt8, osd::Int8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Attention, osd::Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
