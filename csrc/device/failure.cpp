#include "device/failure.h"

#include "check.h"

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace gpipe_fast {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// The storages of noted tensors, by address; freed ones are removed whenever their number may have doubled. Never
// destroyed, because tensors may be freed while the process exits.
struct Noted {
  std::mutex mutex;
  std::map<c10::DeviceIndex, std::string> failures;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> storages;
  size_t clean_up_at = 1024;
};

Noted& noted() {
  static auto* const made = new Noted;
  return *made;
}

FindFailure& registered() {
  static FindFailure function = nullptr;
  return function;
}

}  // namespace

void note_shared(const at::Tensor& tensor) {
  Noted& all = noted();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.storages.size() >= all.clean_up_at) {
    for (auto it = all.storages.begin(); it != all.storages.end();)
      it = it->second.expired() ? all.storages.erase(it) : std::next(it);
    all.clean_up_at = std::max<size_t>(1024, 2 * all.storages.size());
  }
  all.storages.try_emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage().getWeakStorageImpl());
}

void free_shared(std::vector<at::Tensor>& tensors) noexcept {
  for (at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.has_storage()) continue;
    c10::Storage storage = tensor.storage();
    tensor.reset();
    if (storage.use_count() > 1) continue;
    const at::Device device = storage.device();
    // A destructor must not throw, so the deleter is called here.
    c10::DataPtr memory = storage.set_data_ptr(c10::DataPtr(nullptr, device));
    const c10::DeleterFnPtr free = memory.get_deleter();
    void* const context = memory.release_context();
    try {
      if (context != nullptr) free(context);
    } catch (const std::exception&) {
      survive_failure(device);
    }
  }
  tensors.clear();
}

void survive_failure(at::Device device) noexcept {
  if (!device.is_cuda() || registered() == nullptr) return;
  const std::string failure = registered()(device.index());
  if (failure.empty()) return;
  Noted& all = noted();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.failures.emplace(device.index(), failure);
  for (auto& [address, weak] : all.storages) {
    (void)weak.lock().release();
  }
}

void check_alive(at::Device device) {
  if (!device.is_cuda()) return;
  Noted& all = noted();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.failures.find(device.index());
  GPIPE_CHECK(found == all.failures.end(), device,
              " has failed, and can be used again only in a new process: ", found->second);
}

bool register_find_failure(FindFailure function) {
  registered() = function;
  return true;
}

}  // namespace gpipe_fast
