# What is in the wheel, as CycloneDX in its .dist-info/sboms (PEP 770): our own libraries, what compiled them, what they and
# the Python code need at run time. Nothing of a third party is bundled. Run at install time: it hashes what is installed.
#   LIBRARIES  files, FOLDER where they lie      PYPROJECT  for name, licence and dependencies
#   VERSION    of the distribution               DEPENDENCIES  as in PYPROJECT, where that leaves them to the version
#   COMPILER   in words                          OUTPUT     the file

file(READ "${PYPROJECT}" project)
string(REGEX MATCH "\nname = \"([^\"]+)\"" _ "${project}")
set(distribution "${CMAKE_MATCH_1}")
string(REGEX MATCH "\nlicense = \"([^\"]+)\"" _ "${project}")
set(licence "${CMAKE_MATCH_1}")
if(NOT DEFINED DEPENDENCIES)
  string(REGEX MATCH "\ndependencies = \\[\n([^]]*)\\]" _ "${project}")
  set(DEPENDENCIES "${CMAKE_MATCH_1}")
endif()
string(REGEX MATCHALL "\n? *\"[^\"]+\"" requirements "${DEPENDENCIES}")

set(whole "pkg:pypi/${distribution}@${VERSION}")
set(components "")
set(needed "")
foreach(library IN LISTS LIBRARIES)
  file(SHA256 "${FOLDER}/${library}" digest)
  list(APPEND components "    {\"type\": \"library\", \"bom-ref\": \"${library}\", \"name\": \"${library}\", \"version\": \"${VERSION}\",
     \"hashes\": [{\"alg\": \"SHA-256\", \"content\": \"${digest}\"}], \"licenses\": [{\"license\": {\"id\": \"${licence}\"}}],
     \"properties\": [{\"name\": \"lagom:compiler\", \"value\": \"${COMPILER}\"}]}")
  list(APPEND needed "\"${library}\"")
endforeach()
foreach(requirement IN LISTS requirements)
  string(REGEX MATCH "\"([A-Za-z0-9_.-]+)([^\"]*)\"" _ "${requirement}")
  set(name "${CMAKE_MATCH_1}")
  set(range "${CMAKE_MATCH_2}")
  list(APPEND components "    {\"type\": \"library\", \"bom-ref\": \"pkg:pypi/${name}\", \"name\": \"${name}\", \"purl\": \"pkg:pypi/${name}\",
     \"scope\": \"required\", \"isExternal\": true, \"versionRange\": \"vers:pypi/${range}\"}")
  list(APPEND needed "\"pkg:pypi/${name}\"")
endforeach()
string(REPLACE ";" ",\n" components "${components}")
string(REPLACE ";" ", " needed "${needed}")
file(WRITE "${OUTPUT}" "{
  \"bomFormat\": \"CycloneDX\",
  \"specVersion\": \"1.7\",
  \"version\": 1,
  \"metadata\": {
    \"component\": {\"type\": \"library\", \"bom-ref\": \"${whole}\", \"name\": \"${distribution}\", \"version\": \"${VERSION}\", \"purl\": \"${whole}\",
     \"licenses\": [{\"license\": {\"id\": \"${licence}\"}}]}
  },
  \"components\": [
${components}
  ],
  \"dependencies\": [{\"ref\": \"${whole}\", \"dependsOn\": [${needed}]}]
}
")
