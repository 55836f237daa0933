// One call of an operator: its gradients, the plan for them, and the lock that holds from looking
// it up to the last launch with it.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <memory>
#include <mutex>
#include <optional>

#include "../inputs.h"
#include "../tensors.h"
#include "device.h"

namespace fastclip::cuda {

// The device of the first tensor is that of the list.
Accepted accepted(const TensorList& grads);

class Session {
 public:
  // `stream`: a cudaStream_t of the gradients' device.
  Session(const TensorList& grads, bool writable, int64_t stream);

  int64_t refused() const { return inputs_.refused; }
  // Whether there is anything to launch. The members below are for then alone.
  bool runs() const { return inputs_.refused < 0 && !inputs_.pieces.list.empty(); }
  bool wide() const { return inputs_.wide; }
  int64_t rows() const { return int64_t(inputs_.pieces.list.size()); }
  Place place() const { return place_; }

  Call call(Norm norm, Row* table) const;
  Number number(const std::optional<Tensor>& tensor, const char* name, double absent) const;
  // Doubles on the device.
  const double* doubles(const Tensor& values, const char* name) const;
  bool launch(Kernel kernel, const Call& call) const;
  // Both passes, or the first alone if nothing can have to be written.
  void clip(Call call, bool measures_only) const;

 private:
  bool keeps_plans() const;
  void find_plan();
  void make_plan();
  void move_plan();
  void send(int64_t first, int64_t n) const;

  Inputs inputs_;
  Place place_;
  void* stream_;
  std::unique_lock<std::mutex> lock_;
  // Torch's own: to go back to a device that nobody has used yet, it makes no context there.
  std::optional<torch::stable::accelerator::DeviceGuard> on_device_;
  Setting setting_;
  std::unique_ptr<Plan> own_;  // of this call alone
  Plan* plan_ = nullptr;
  std::vector<uint64_t> addresses_;  // for the arguments
};

}  // namespace fastclip::cuda
