#include "transport/coalesced_copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {
namespace {

// Returns the number of elements that a tensor's memory spans, gaps included.
int64_t num_spanned_elements(const at::Tensor& tensor) {
  int64_t elements = tensor.numel() > 0 ? 1 : 0;
  for (int64_t dim = 0; elements > 0 && dim < tensor.dim(); ++dim)
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  return elements;
}

int64_t num_bytes(const at::Tensor& tensor) {
  return num_spanned_elements(tensor) * static_cast<int64_t>(tensor.itemsize());
}

void set_bits(const at::Tensor& tensor, bool conj, bool neg) {
  tensor.unsafeGetTensorImpl()->_set_conj(conj);
  tensor.unsafeGetTensorImpl()->_set_neg(neg);
}

CoalescedCopy coalesce(std::vector<CoalescedCopy::Part> parts) {
  int64_t end = 0;
  for (CoalescedCopy::Part& part : parts) {
    part.offset =
        (end + CoalescedCopy::kAlignment - 1) / CoalescedCopy::kAlignment * CoalescedCopy::kAlignment;
    end = part.offset + num_bytes(part.tensor);
  }
  const at::Device device = parts.front().tensor.device();
  const auto options = at::TensorOptions(at::kByte).device(device).pinned_memory(device.is_cpu());
  CoalescedCopy buffer{at::empty({end}, options), std::move(parts)};
  std::vector<at::Tensor> destinations, bytes;
  for (const CoalescedCopy::Part& part : buffer.parts) {
    bytes.push_back(as_bytes(part.tensor));
    destinations.push_back(buffer.bytes.narrow(0, part.offset, bytes.back().numel()));
  }
  at::_foreach_copy_(destinations, bytes, /*non_blocking=*/true);
  return buffer;
}

}  // namespace

at::Tensor flat(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor memory = tensor.as_strided({num_spanned_elements(tensor)}, {1}, tensor.storage_offset());
  set_bits(memory, false, false);
  return memory;
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return flat(tensor).view(at::kByte);
}

std::vector<CoalescedCopy> pack(const std::vector<at::Tensor>& tensors, bool coalesce_small,
                                bool& enqueued_work) {
  std::vector<CoalescedCopy> packed;
  std::vector<CoalescedCopy::Part> small;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || tensors[i].numel() == 0) continue;
    if (coalesce_small && num_bytes(tensors[i]) <= CoalescedCopy::kMaxSmallBytes) {
      small.push_back({i, tensors[i], 0});
    } else {
      packed.push_back({as_bytes(tensors[i]), {{i, tensors[i], 0}}});
    }
  }
  if (small.size() >= CoalescedCopy::kMinSmallTensors) {
    enqueued_work = true;
    packed.push_back(coalesce(std::move(small)));
    return packed;
  }
  for (CoalescedCopy::Part& part : small) packed.push_back({as_bytes(part.tensor), {part}});
  return packed;
}

void unpack(const CoalescedCopy& buffer, const at::Tensor& arrived, std::vector<at::Tensor>& tensors) {
  for (const CoalescedCopy::Part& part : buffer.parts) {
    const at::Tensor& sent = part.tensor;
    tensors[part.index] = arrived.narrow(0, part.offset, num_bytes(sent))
                              .view(sent.scalar_type())
                              .as_strided(sent.sizes(), sent.strides());
    set_bits(tensors[part.index], sent.is_conj(), sent.is_neg());
  }
}

}  // namespace gpipe_fast
