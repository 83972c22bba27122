// Answer lookups from lines of "workload<tab>device<tab>SMs", or (with a table alone) parse it and exit.

#include "lookup_table.hpp"

#include <cstdio>
#include <iostream>

static std::string text(const tunebench::Config& config) {
  std::string all;
  for (const auto& [name, value] : config.values()) {
    all += " " + name + "=";
    if (const auto* whole = std::get_if<std::int64_t>(&value)) all += std::to_string(*whole);
    else if (const auto* words = std::get_if<std::string>(&value)) all += *words;
    else if (const auto* flag = std::get_if<bool>(&value)) all += *flag ? "True" : "False";
    else all += std::to_string(config.number(name));
  }
  return all;
}

int main(int count, char** arguments) {
  for (int i = 2; i < count; i++) {  // damaged tables: each is refused
    try {
      const auto table = tunebench::LookupTable::read(arguments[i]);
      std::cout << "read " << table.size() << "\n";
      table.find("softmax:rows=3,cols=5,dtype=f32", "sm_90:h100-sxm,sm=132");
    } catch (const tunebench::TableError& error) {
      std::cout << error.what() << "\n";
    } catch (const tunebench::WorkloadError& error) {
      std::cout << error.what() << "\n";
    }
  }
  if (count > 2) return 0;
  const auto table = tunebench::LookupTable::read(arguments[1]);
  const char* kinds[] = {"exact", "nearest", "fallback"};
  for (std::string line; std::getline(std::cin, line);) {
    const std::size_t first = line.find('\t'), second = line.find('\t', first + 1);
    const std::string device = line.substr(first + 1, second - first - 1);
    try {
      const auto answer = table.find(line.substr(0, first), device, std::stoll(line.substr(second + 1)));
      if (!answer) std::cout << "none\n";
      else
        std::cout << kinds[static_cast<int>(answer->match)] << " " << answer->workload << " on "
                  << answer->device << " " << answer->variant << text(answer->config) << "\n";
    } catch (const tunebench::WorkloadError& error) {
      std::cout << error.what() << "\n";
    }
  }
}
