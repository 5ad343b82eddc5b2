#include "device/copier.h"

namespace gpipe_fast {
namespace {

const Copier*& offered() {
  static const Copier* copier = nullptr;
  return copier;
}

}  // namespace

const Copier* copier() { return offered(); }

bool offer_copier(const Copier& copier) {
  offered() = &copier;
  return true;
}

}  // namespace gpipe_fast
