// The operators of the native library: their schemas and their CPU registration. They serve a list
// whole or not at all: `refused` is the position of the first tensor that the kernels cannot take
// as it is, -1 if there is none; when one is refused nothing has been touched and the tensors
// returned are empty.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "cpu/kernels.h"
#include "cpu/passes.h"
#include "inputs.h"
#include "tensors.h"

namespace fastclip {
namespace {

void run_parallel(int workers, void (*fn)(void*), void* ctx) {
  struct Call {
    void (*fn)(void*);
    void* ctx;
  } call{fn, ctx};
  const auto each = [](int64_t begin, int64_t end, void* c) {
    for (int64_t i = begin; i < end; ++i) static_cast<Call*>(c)->fn(static_cast<Call*>(c)->ctx);
  };
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, workers, 1, each, &call));
}

cpu::Threads threads() {
  uint32_t count;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&count));
  return {int(count), run_parallel};
}

Accepted accepted() { return {aoti_torch_device_type_cpu(), -1, true}; }

Inputs collect(const TensorList& grads, bool writable, Order order = Order::kMemory) {
  Inputs inputs = collect(grads, writable, accepted(), order);
  refuse_repeated(inputs);
  return inputs;
}

int64_t number_of_units(const Inputs& inputs) {
  return inputs.units.empty() ? 0 : inputs.units.back().first + inputs.units.back().count;
}

// Doubles that the host can read.
const double* doubles(const Tensor& values, const char* name) {
  STD_TORCH_CHECK(is_contiguous_double(values) && values.is_cpu(), name,
                  " must be contiguous, float64 and on the CPU");
  return static_cast<const double*>(values.const_data_ptr());
}

double number(StableIValue value, const char* name, double absent) {
  const auto tensor = to<std::optional<Tensor>>(value);
  if (!tensor) return absent;
  STD_TORCH_CHECK(tensor->numel() == 1, name, " has ", tensor->numel(), " elements, not one");
  return *doubles(*tensor, name);
}

Row* rows_of(const Tensor& table) {
  static_assert(sizeof(Row) == kColumns * sizeof(double), "a Row is a row of the table");
  return static_cast<Row*>(table.mutable_data_ptr());
}

void unscale(Row* rows, size_t n, double inv_scale, Norm norm) {
  if (inv_scale == 1) return;
  for (size_t i = 0; i < n; ++i) unscale(rows[i], inv_scale, norm);
}

Tensor measured(const Pieces& pieces, Norm norm, double inv_scale) {
  Tensor table = empty_table(int64_t(pieces.list.size()));
  cpu::measure(pieces, norm, threads(), rows_of(table));
  unscale(rows_of(table), pieces.list.size(), inv_scale, norm);
  return table;
}

double total_norm(const Row* rows, int64_t n, Norm norm) {
  double power = 0;
  for (int64_t i = 0; i < n; ++i) power = combine_power(power, rows[i].power, norm);
  return total_norm(power, norm);
}

bool all_finite(const Row* rows, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (rows[i].nan > 0 || rows[i].inf > 0) return false;
  return true;
}

// measure(Tensor[] grads, float p, Tensor? inv_scale) -> (Tensor table, int refused)
void measure(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Norm norm = norm_of(to<double>(stack[1]));
  const double inv_scale = number(stack[2], "inv_scale", 1);
  const Inputs inputs = collect(grads, false);
  const bool served = inputs.refused < 0;
  stack[0] = from(served ? measured(inputs.pieces, norm, inv_scale) : empty_table(0));
  stack[1] = from(inputs.refused);
}

// measure_units(Tensor[] grads, float p, Tensor? inv_scale)
//   -> (Tensor table, Tensor norms, int refused)
// `norms`: the 2-norm of each unit of each tensor, as stored; float64 [units].
void measure_units(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Norm norm = norm_of(to<double>(stack[1]));
  const double inv_scale = number(stack[2], "inv_scale", 1);
  const Inputs inputs = collect(grads, false, Order::kByUnit);
  const bool served = inputs.refused < 0;
  const Tensor table = empty_table(served ? grads.size() : 0);
  const Tensor norms = empty({served ? number_of_units(inputs) : 0}, aoti_torch_dtype_float64());
  if (served) {
    auto* out = static_cast<double*>(norms.mutable_data_ptr());
    cpu::measure_units(inputs.pieces, inputs.units.data(), norm, threads(), rows_of(table), out);
    unscale(rows_of(table), inputs.units.size(), inv_scale, norm);
  }
  stack[0] = from(table);
  stack[1] = from(norms);
  stack[2] = from(inputs.refused);
}

// unit_norms(Tensor[] tensors) -> (Tensor norms, int refused); the norms alone, of any tensors
void unit_norms(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors(stack[0]);
  const Inputs inputs = fastclip::collect(tensors, false, accepted(), Order::kByUnit);
  const bool served = inputs.refused < 0;
  const Tensor norms = empty({served ? number_of_units(inputs) : 0}, aoti_torch_dtype_float64());
  if (served)
    cpu::measure_units(inputs.pieces, inputs.units.data(), Norm::kSquares, threads(), nullptr,
                       static_cast<double*>(norms.mutable_data_ptr()));
  stack[0] = from(norms);
  stack[1] = from(inputs.refused);
}

// scale_(Tensor(a!)[] grads, Tensor coef) -> (int refused, bool written); coef: 0-d or [n]
void scale_(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Tensor coef = to<Tensor>(stack[1]);
  const double* coefs = doubles(coef, "coef");
  const int64_t n = coef.numel();
  STD_TORCH_CHECK(n == 1 || n == grads.size(), "coef has ", n, " elements for ", grads.size(),
                  " gradients");
  const Inputs inputs = collect(grads, true);
  if (inputs.refused < 0) cpu::scale(inputs.pieces, coefs, n == 1 ? 0 : 1, threads());
  stack[0] = from(inputs.refused);
  stack[1] = from(inputs.refused < 0 &&
                  std::any_of(coefs, coefs + n, [](double factor) { return factor != 1; }));
}

// scale_units_(Tensor(a!)[] grads, Tensor coef) -> (int refused, Tensor written)
// coef: [units], one tensor after the other; `written`: uint8 [n], 1 where a factor is not 1.
void scale_units_(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Tensor coef = to<Tensor>(stack[1]);
  const double* coefs = doubles(coef, "coef");
  const int64_t n = coef.numel();
  const Inputs inputs = collect(grads, true, Order::kByUnit);
  const bool served = inputs.refused < 0;
  const Tensor written = empty({served ? grads.size() : 0}, aoti_torch_dtype_uint8());
  if (served) {
    const int64_t units = number_of_units(inputs);
    STD_TORCH_CHECK(n == units, "coef has ", n, " elements for ", units, " units");
    cpu::scale_units(inputs.pieces, inputs.units.data(), coefs, threads());
    auto* out = static_cast<uint8_t*>(written.mutable_data_ptr());
    for (const Units& each : inputs.units) {
      const double* own = coefs + each.first;
      *out++ = std::any_of(own, own + each.count, [](double factor) { return factor != 1; });
    }
  }
  stack[0] = from(inputs.refused);
  stack[1] = from(written);
}

// clip_(Tensor(a!)[] grads, float p, float max_norm, Tensor? limit, Tensor? inv_scale, bool skip)
//   -> (Tensor table, Tensor total_norm, Tensor coef, int refused, bool written)
// `limit` goes before max_norm. `skip`: with an element that is not finite nothing is written.
void clip_(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Norm norm = norm_of(to<double>(stack[1]));
  const double max_norm = number(stack[3], "limit", to<double>(stack[2]));
  const double inv_scale = number(stack[4], "inv_scale", 1);
  const bool skip = to<bool>(stack[5]);
  const Inputs inputs = collect(grads, true);
  const int64_t n = inputs.refused < 0 ? grads.size() : 0;
  Tensor table = empty_table(0);
  double total = 0;
  Factors by = {1, 1};
  if (inputs.refused < 0) {
    table = measured(inputs.pieces, norm, inv_scale);
    const Row* rows = rows_of(table);
    total = total_norm(rows, n, norm);
    by = factors(total, max_norm, inv_scale, skip && !all_finite(rows, n));
    if (by.factor != 1) cpu::scale(inputs.pieces, &by.factor, 0, threads());
  }
  stack[0] = from(table);
  stack[1] = from(scalar(total, inputs.wide));
  stack[2] = from(scalar(by.coef, true));
  stack[3] = from(inputs.refused);
  stack[4] = from(by.factor != 1);
}

// served(Tensor[] grads) -> Tensor: uint8 [n]
void served(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList grads(stack[0]);
  const Tensor mask = empty({grads.size()}, aoti_torch_dtype_uint8());
  mark_served(grads, accepted(), static_cast<uint8_t*>(mask.mutable_data_ptr()));
  stack[0] = from(mask);
}

// The level in use; "" only asks. Unknown or missing levels change nothing, so the answer tells.
std::string simd(std::string level) {
  if (!level.empty()) cpu::choose_kernels(level.c_str());
  return cpu::kernels().name;
}

// An array, which is in the file in one piece: it is looked for there without loading the library.
__attribute__((used)) constexpr char kSourceHash[] = FASTCLIP_SOURCE_HASH;
std::string source_hash() { return kSourceHash; }

}  // namespace
}  // namespace fastclip

STABLE_TORCH_LIBRARY(fastclip_native, m) {
  m.def("measure(Tensor[] grads, float p, Tensor? inv_scale) -> (Tensor table, int refused)");
  m.def(
      "measure_units(Tensor[] grads, float p, Tensor? inv_scale)"
      " -> (Tensor table, Tensor norms, int refused)");
  m.def("unit_norms(Tensor[] tensors) -> (Tensor norms, int refused)");
  m.def("scale_(Tensor(a!)[] grads, Tensor coef) -> (int refused, bool written)");
  m.def("scale_units_(Tensor(a!)[] grads, Tensor coef) -> (int refused, Tensor written)");
  m.def(
      "clip_(Tensor(a!)[] grads, float p, float max_norm, Tensor? limit, Tensor? inv_scale,"
      " bool skip)"
      " -> (Tensor table, Tensor total_norm, Tensor coef, int refused, bool written)");
  m.def("served(Tensor[] grads) -> Tensor");
  m.def("simd(str level) -> str");
  m.def("source_hash() -> str");
}

// For every device: it is the kernels that refuse a tensor, not the dispatcher.
STABLE_TORCH_LIBRARY_IMPL(fastclip_native, CompositeExplicitAutograd, m) {
  m.impl("measure", &fastclip::measure);
  m.impl("measure_units", &fastclip::measure_units);
  m.impl("unit_norms", &fastclip::unit_norms);
  m.impl("scale_", &fastclip::scale_);
  m.impl("scale_units_", &fastclip::scale_units_);
  m.impl("clip_", &fastclip::clip_);
  m.impl("served", &fastclip::served);
  m.impl("simd", TORCH_BOX(&fastclip::simd));
  m.impl("source_hash", TORCH_BOX(&fastclip::source_hash));
}

// Gradients of gradients are not defined, and the dispatcher's own fallback costs time on every
// tensor.
STABLE_TORCH_LIBRARY_IMPL(fastclip_native, Autograd, m) {
  m.impl("measure", &fastclip::measure);
  m.impl("measure_units", &fastclip::measure_units);
  m.impl("unit_norms", &fastclip::unit_norms);
  m.impl("scale_", &fastclip::scale_);
  m.impl("scale_units_", &fastclip::scale_units_);
  m.impl("clip_", &fastclip::clip_);
  m.impl("served", &fastclip::served);
}
