#include "transport/parcel.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace gpipe_fast {
namespace {

// Returns the number of elements that a tensor's memory spans, gaps included.
int64_t extent(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  return elements;
}

int64_t num_bytes(const at::Tensor& tensor) {
  return extent(tensor) * static_cast<int64_t>(tensor.itemsize());
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.as_strided({extent(tensor)}, {1}).view(at::kByte);
}

Parcel put_together(std::vector<Parcel::Part> parts) {
  int64_t end = 0;
  for (Parcel::Part& part : parts) {
    part.offset = (end + Parcel::kAlignment - 1) / Parcel::kAlignment * Parcel::kAlignment;
    end = part.offset + num_bytes(part.tensor);
  }
  const at::Device device = parts.front().tensor.device();
  const auto options = at::TensorOptions(at::kByte).device(device).pinned_memory(device.is_cpu());
  Parcel parcel{at::empty({end}, options), std::move(parts)};
  std::vector<at::Tensor> places, bytes;
  for (const Parcel::Part& part : parcel.parts) {
    bytes.push_back(bytes_of(part.tensor));
    places.push_back(parcel.bytes.narrow(0, part.offset, bytes.back().numel()));
  }
  at::_foreach_copy_(places, bytes, /*non_blocking=*/true);
  return parcel;
}

}  // namespace

std::vector<Parcel> pack(const std::vector<at::Tensor>& tensors, bool together, bool& computed) {
  std::vector<Parcel> parcels;
  std::vector<Parcel::Part> small;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || tensors[i].numel() == 0) continue;
    const at::Tensor plain = tensors[i].resolve_conj().resolve_neg();
    computed = computed || !plain.is_same(tensors[i]);
    if (together && num_bytes(plain) <= Parcel::kSmallBytes) {
      small.push_back({i, plain, 0});
    } else {
      parcels.push_back({bytes_of(plain), {{i, plain, 0}}});
    }
  }
  if (small.size() >= Parcel::kFewest) {
    computed = true;
    parcels.push_back(put_together(std::move(small)));
    return parcels;
  }
  for (Parcel::Part& part : small) parcels.push_back({bytes_of(part.tensor), {part}});
  return parcels;
}

void unpack(const Parcel& parcel, const at::Tensor& arrived, std::vector<at::Tensor>& tensors) {
  for (const Parcel::Part& part : parcel.parts) {
    const at::Tensor& sent = part.tensor;
    tensors[part.index] = arrived.narrow(0, part.offset, num_bytes(sent))
                              .view(sent.scalar_type())
                              .as_strided(sent.sizes(), sent.strides());
  }
}

}  // namespace gpipe_fast
