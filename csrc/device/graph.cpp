#include "device/graph.h"

namespace gpipe_fast {
namespace {

using Make = std::unique_ptr<GraphMaker> (*)();

Make& registered() {
  static Make make = nullptr;
  return make;
}

}  // namespace

std::unique_ptr<GraphMaker> make_graph_maker() { return registered() ? registered()() : nullptr; }

GraphMakerRegistration::GraphMakerRegistration(Make make) { registered() = make; }

}  // namespace gpipe_fast
