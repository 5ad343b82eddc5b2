#include "device/copier.h"

namespace gpipe_fast {
namespace {

const Copier*& registered() {
  static const Copier* copier = nullptr;
  return copier;
}

}  // namespace

const Copier* copier() { return registered(); }

bool register_copier(const Copier& copier) {
  registered() = &copier;
  return true;
}

}  // namespace gpipe_fast
