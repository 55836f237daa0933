#include "session.h"

namespace fastclip::cuda {
namespace {

struct Shared {
  std::mutex lock;
  Plans plans;
};

// Never freed: at exit the CUDA runtime may be gone before.
Shared& shared() {
  static Shared* const shared = new Shared;
  return *shared;
}

int32_t served_device_type() {
#ifdef FASTCLIP_CUDA_ON_CPU
  return aoti_torch_device_type_cpu();
#else
  return aoti_torch_device_type_cuda();
#endif
}

bool is_at(const Tensor& tensor, const Place& place) {
  Place own;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &own.device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &own.device_index));
  return own.device_type == place.device_type && own.device_index == place.device_index;
}

}  // namespace

Accepted accepted(const TensorList& grads) {
  int32_t index = -1;
  if (grads.size() > 0)
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(grads[0], &index));
  return {served_device_type(), index, false};
}

Session::Session(const TensorList& grads, bool writable, int64_t stream)
    : stream_(reinterpret_cast<void*>(stream)) {
  const Accepted here = accepted(grads);
  place_ = {here.device_type, here.device_index};
  inputs_ = collect(grads, writable, here);
  if (!runs()) return;
  lock_ = std::unique_lock<std::mutex>(shared().lock);
  const int device = std::max(0, int(here.device_index));
#ifndef FASTCLIP_CUDA_ON_CPU
  on_device_.emplace(device);
#endif
  use_device(device);
  setting_ = {device, stream, limits_of(device), is_capturing(stream_)};
  find_plan();
}

// A plan's memory is used in the order of its stream. The streams of all threads have one handle:
// nothing is kept for it, and each call makes a plan.
bool Session::keeps_plans() const {
  constexpr int64_t kStreamPerThread = 2;  // cudaStreamPerThread
  return !setting_.capturing && setting_.stream != kStreamPerThread;
}

// What is captured is replayed later, and must then find the tables as they are now, whatever other
// calls have done to theirs: a capturing call has tables of its own, which the graph itself uploads
// each time, in memory of the graph. Like any temporary it may be used again further on in it.
void Session::find_plan() {
  plan_ = keeps_plans() ? shared().plans.find(inputs_.pieces, setting_) : nullptr;
  if (!plan_ || !plan_->has_addresses_of(inputs_.pieces)) {
    refuse_repeated(inputs_);
    if (!runs()) return;
    if (plan_) {
      move_plan();
    } else {
      make_plan();
    }
  }
  if (!plan_->stores_addresses())
    for (const Piece& piece : inputs_.pieces.list)
      addresses_.push_back(reinterpret_cast<uintptr_t>(piece.data));
}

void Session::move_plan() {
  const Plan::Range changed = plan_->replace_addresses(inputs_.pieces);
  send(changed.first, changed.n);
  plan_->note_addresses(inputs_.pieces);
}

void Session::make_plan() {
  own_ = std::make_unique<Plan>(inputs_.pieces, setting_);
  plan_ = own_.get();
  static const int32_t int64 = aoti_torch_dtype_int64();
  auto memory = std::make_shared<Tensor>(empty({plan_->memory_words()}, int64, place_));
  plan_->on_device = plan_->tables(static_cast<uint64_t*>(memory->mutable_data_ptr()));
  plan_->memory = std::move(memory);
  send(0, int64_t(plan_->words().size()));
  if (keeps_plans()) plan_ = shared().plans.add(std::move(own_));
}

// Words to the device, behind what its stream has to do already.
void Session::send(int64_t first, int64_t n) const {
  auto* memory = static_cast<Tensor*>(plan_->memory.get())->mutable_data_ptr();
  store(static_cast<uint64_t*>(memory) + first, plan_->words().data() + first, n, setting_.limits,
        stream_);
}

Call Session::call(Norm norm, Row* table) const {
  Call call = {};
  call.tables = plan_->on_device;
  call.table = table;
  call.max_norm.value = HUGE_VAL;
  call.inv_scale.value = 1;
  call.rows = int32_t(rows());
  call.norm = norm;
  return call;
}

const double* Session::doubles(const Tensor& values, const char* name) const {
  STD_TORCH_CHECK(is_contiguous_double(values) && is_at(values, place_), name,
                  " must be contiguous, float64 and on the device of the gradients");
  return static_cast<const double*>(values.const_data_ptr());
}

Number Session::number(const std::optional<Tensor>& tensor, const char* name, double absent) const {
  if (!tensor) return {nullptr, absent};
  STD_TORCH_CHECK(tensor->numel() == 1, name, " has ", tensor->numel(), " elements, not one");
  if (is_at(*tensor, place_) || !tensor->is_cpu()) return {doubles(*tensor, name), 0};
  STD_TORCH_CHECK(is_contiguous_double(*tensor), name, " must be contiguous and float64");
  return {nullptr, *static_cast<const double*>(tensor->const_data_ptr())};
}

bool Session::launch(Kernel kernel, const Call& call) const {
  return cuda::launch(
      {kernel, plan_->blocks(), call, addresses_.data(), int(addresses_.size()), stream_});
}

void Session::clip(Call call, bool measures_only) const {
  call.factors = call.tables.factor;
  if (!measures_only && plan_->cooperative()) {
    if (launch(Kernel::kClip, call)) return;
    plan_->forgo_cooperative();
  }
  launch(Kernel::kMeasure, call);
  if (!measures_only) launch(Kernel::kScale, call);
}

}  // namespace fastclip::cuda
