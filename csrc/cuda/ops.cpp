// The operators of the CUDA library: their schemas and their registration. They serve a list whole
// or not at all, as those in ../ops.cpp do. `stream` is a cudaStream_t of the device of the first
// gradient; on it everything runs in order, and the host waits for nothing.
#include <string>

#include "session.h"

#ifndef FASTCLIP_CUDA_LIBRARY
#define FASTCLIP_CUDA_LIBRARY fastclip_cuda
#endif

namespace fastclip::cuda {
namespace {

Tensor new_table(const Session& session) {
  return session.runs() ? empty_table(session.rows(), session.place()) : empty_table(0);
}

// For a kernel to fill in, if any runs.
Tensor new_scalar(const Session& session, bool wide, double otherwise) {
  return session.runs() ? empty_scalar(wide, session.place()) : scalar(otherwise, wide);
}

// measure(Tensor[] grads, float p, Tensor? inv_scale, int stream) -> (Tensor table, int refused)
void measure(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Norm norm = norm_of(to<double>(stack[1]));
  const auto inv_scale = to<std::optional<Tensor>>(stack[2]);
  const Session session(grads, false, to<int64_t>(stack[3]));
  Tensor table = new_table(session);
  if (session.runs()) {
    Call call = session.call(norm, static_cast<Row*>(table.mutable_data_ptr()));
    call.inv_scale = session.number(inv_scale, "inv_scale", 1);
    session.launch(Kernel::kMeasure, call);
  }
  stack[0] = from(table);
  stack[1] = from(session.refused());
}

// scale_(Tensor(a!)[] grads, Tensor coef, int stream) -> int refused; coef: 0-d or [n]
void scale_(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Tensor coef = to<Tensor>(stack[1]);
  const Session session(grads, true, to<int64_t>(stack[2]));
  const int64_t n = coef.numel();
  STD_TORCH_CHECK(n == 1 || n == grads.size(), "coef has ", n, " elements for ", grads.size(),
                  " gradients");
  if (session.runs()) {
    Call call = session.call(Norm::kSquares, nullptr);
    call.factors = session.doubles(coef, "coef");
    call.factor_per_row = n > 1;
    session.launch(Kernel::kScale, call);
  }
  stack[0] = from(session.refused());
}

// clip_(Tensor(a!)[] grads, float p, float max_norm, Tensor? limit, Tensor? inv_scale, bool skip,
//       int stream) -> (Tensor table, Tensor total_norm, Tensor coef, int refused)
// `limit` goes before max_norm. `skip`: with an element that is not finite nothing is written.
void clip_(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Norm norm = norm_of(to<double>(stack[1]));
  const double max_norm = to<double>(stack[2]);
  const auto limit = to<std::optional<Tensor>>(stack[3]);
  const auto inv_scale = to<std::optional<Tensor>>(stack[4]);
  const bool skip = to<bool>(stack[5]);
  const Session session(grads, true, to<int64_t>(stack[6]));
  Tensor table = new_table(session);
  Tensor total = new_scalar(session, session.wide(), 0);
  Tensor coef = new_scalar(session, true, 1);
  if (session.runs()) {
    Call call = session.call(norm, static_cast<Row*>(table.mutable_data_ptr()));
    call.max_norm = session.number(limit, "limit", max_norm);
    call.inv_scale = session.number(inv_scale, "inv_scale", 1);
    call.total = total.mutable_data_ptr();
    call.coef = static_cast<double*>(coef.mutable_data_ptr());
    call.wide = session.wide();
    call.skip = skip;
    session.clip(call, !limit && !inv_scale && max_norm == HUGE_VAL);
  }
  stack[0] = from(table);
  stack[1] = from(total);
  stack[2] = from(coef);
  stack[3] = from(session.refused());
}

// served(Tensor[] grads) -> Tensor: uint8 [n], for the device of the first
void served(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Tensor mask = empty({grads.size()}, aoti_torch_dtype_uint8());
  mark_served(grads, accepted(grads), static_cast<uint8_t*>(mask.mutable_data_ptr()));
  stack[0] = from(mask);
}

// An array, which is in the file in one piece: it is looked for there without loading the library.
__attribute__((used)) constexpr char kSourceHash[] = FASTCLIP_SOURCE_HASH;
std::string source_hash() { return kSourceHash; }

}  // namespace
}  // namespace fastclip::cuda

// The macros of torch paste the name: one more level replaces it before.
#define FASTCLIP_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define FASTCLIP_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

FASTCLIP_LIBRARY(FASTCLIP_CUDA_LIBRARY, m) {
  m.def(
      "measure(Tensor[] grads, float p, Tensor? inv_scale, int stream)"
      " -> (Tensor table, int refused)");
  m.def("scale_(Tensor(a!)[] grads, Tensor coef, int stream) -> int refused");
  m.def(
      "clip_(Tensor(a!)[] grads, float p, float max_norm, Tensor? limit, Tensor? inv_scale,"
      " bool skip, int stream)"
      " -> (Tensor table, Tensor total_norm, Tensor coef, int refused)");
  m.def("served(Tensor[] grads) -> Tensor");
  m.def("launches() -> int");
  m.def("source_hash() -> str");
}

// For every device: it is the kernels that refuse a tensor, not the dispatcher.
FASTCLIP_LIBRARY_IMPL(FASTCLIP_CUDA_LIBRARY, CompositeExplicitAutograd, m) {
  m.impl("measure", &fastclip::cuda::measure);
  m.impl("scale_", &fastclip::cuda::scale_);
  m.impl("clip_", &fastclip::cuda::clip_);
  m.impl("served", &fastclip::cuda::served);
  m.impl("launches", TORCH_BOX(&fastclip::cuda::launches));
  m.impl("source_hash", TORCH_BOX(&fastclip::cuda::source_hash));
}

// Gradients of gradients are not defined, and the dispatcher's own fallback costs time on every
// tensor.
FASTCLIP_LIBRARY_IMPL(FASTCLIP_CUDA_LIBRARY, Autograd, m) {
  m.impl("measure", &fastclip::cuda::measure);
  m.impl("scale_", &fastclip::cuda::scale_);
  m.impl("clip_", &fastclip::cuda::clip_);
  m.impl("served", &fastclip::cuda::served);
}
