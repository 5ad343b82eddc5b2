#include "cubin.h"

#include <elf.h>

#include <algorithm>
#include <cstring>

namespace fake_cuda {
namespace {

constexpr uint16_t kMachineCuda = 190;

// Records of a section .nv.info: a format, an attribute, and a value of 16 bits or a size and as many bytes.
constexpr uint8_t kSizedFormat = 0x04;
constexpr uint8_t kRequiredThreads = 0x10;  // EIATTR_REQNTID: three numbers of 32 bits
constexpr uint8_t kParameter = 0x17;        // EIATTR_KPARAM_INFO

struct ParameterRecord {
  uint32_t index;
  uint16_t ordinal, offset;
  uint32_t flags;  // the size in bytes is in the bits from 18
};

template <class T>
T at(const char* place) {
  T found;
  std::memcpy(&found, place, sizeof(found));
  return found;
}

CubinKernel read_info(const char* begin, size_t size) {
  CubinKernel found;
  for (size_t place = 0; place + 4 <= size;) {
    const char* const record = begin + place;
    const auto attribute = at<uint8_t>(record + 1);
    const bool sized = at<uint8_t>(record) == kSizedFormat;
    place += 4 + (sized ? at<uint16_t>(record + 2) : 0);
    if (!sized || place > size) {
      continue;
    }
    if (attribute == kRequiredThreads) {
      found.block_threads = at<uint32_t>(record + 4) * at<uint32_t>(record + 8) * at<uint32_t>(record + 12);
    } else if (attribute == kParameter) {
      const auto parameter = at<ParameterRecord>(record + 4);
      found.parameters.resize(std::max<size_t>(found.parameters.size(), parameter.ordinal + size_t{1}));
      found.parameters[parameter.ordinal] = {parameter.offset, static_cast<uint16_t>(parameter.flags >> 18)};
    }
  }
  return found;
}

}  // namespace

std::optional<Cubin> Cubin::read(const void* image) {
  const char* const begin = static_cast<const char*>(image);
  if (std::memcmp(begin, ELFMAG, SELFMAG) != 0 || begin[EI_CLASS] != ELFCLASS64) {
    return std::nullopt;
  }
  const auto header = at<Elf64_Ehdr>(begin);
  if (header.e_machine != kMachineCuda || header.e_shentsize != sizeof(Elf64_Shdr)) {
    return std::nullopt;
  }
  uint64_t size = std::max(header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize,
                           header.e_phoff + uint64_t{header.e_phnum} * header.e_phentsize);
  for (int i = 0; i < header.e_shnum; ++i) {
    const auto section = at<Elf64_Shdr>(begin + header.e_shoff + static_cast<size_t>(i) * sizeof(Elf64_Shdr));
    size = std::max(size, section.sh_type == SHT_NOBITS ? 0 : section.sh_offset + section.sh_size);
  }
  Cubin found;
  found.bytes_.assign(begin, size);
  found.find_kernels();
  return found;
}

unsigned Cubin::capability() const {
  const auto header = at<Elf64_Ehdr>(bytes_.data());
  // The second version of the format has the number one byte further.
  return (header.e_ident[EI_ABIVERSION] < 8 ? header.e_flags : header.e_flags >> 8) & 0xff;
}

// Kernels are the global functions in the symbol table. The section .nv.info.NAME describes a kernel's parameters.
void Cubin::find_kernels() {
  const char* const begin = bytes_.data();
  const auto header = at<Elf64_Ehdr>(begin);
  const auto section = [&](size_t index) {
    return at<Elf64_Shdr>(begin + header.e_shoff + index * sizeof(Elf64_Shdr));
  };
  const char* const names = begin + section(header.e_shstrndx).sh_offset;
  for (size_t i = 0; i < header.e_shnum; ++i) {
    if (section(i).sh_type != SHT_SYMTAB) {
      continue;
    }
    const char* const symbol_names = begin + section(section(i).sh_link).sh_offset;
    for (size_t place = 0; place + sizeof(Elf64_Sym) <= section(i).sh_size; place += sizeof(Elf64_Sym)) {
      const auto symbol = at<Elf64_Sym>(begin + section(i).sh_offset + place);
      if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && ELF64_ST_BIND(symbol.st_info) == STB_GLOBAL) {
        kernels_[symbol_names + symbol.st_name];
      }
    }
  }
  for (size_t i = 0; i < header.e_shnum; ++i) {
    const std::string name = names + section(i).sh_name;
    const std::string prefix = ".nv.info.";
    const auto kernel = kernels_.find(name.size() > prefix.size() ? name.substr(prefix.size()) : "");
    if (name.rfind(prefix, 0) == 0 && kernel != kernels_.end()) {
      kernel->second = read_info(begin + section(i).sh_offset, section(i).sh_size);
    }
  }
}

}  // namespace fake_cuda
